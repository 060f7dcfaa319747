mod policies;
mod readers;
mod reference;
mod report;
mod stats;

pub(crate) use readers::{read, sessions};
