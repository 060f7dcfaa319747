//! What engines want to hear and what their answers mean. Pure: bytes in, bytes out.

pub mod splice;
pub mod sse;
pub mod vllm;

pub use splice::{Edit, Object, SpliceError};
