mod readers;
mod stats;
