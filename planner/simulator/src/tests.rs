mod ablations;
mod kv_model;
mod owner_serve;
mod policies;
mod readers;
mod reference;
mod report;
mod restore_plan;
mod soak;
mod stats;

pub(crate) use readers::{read, sessions};
