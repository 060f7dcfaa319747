//! What engines tell about themselves over HTTP, read without doing any HTTP.

pub mod metrics;
