mod ablations;
mod kv;
mod own;
mod policies;
mod readers;
mod reference;
mod report;
mod soak;
mod stats;

pub(crate) use readers::{read, sessions};
