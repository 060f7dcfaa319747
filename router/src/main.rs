//! The `ownerserve` binary.
fn main() {}
