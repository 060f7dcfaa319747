//! The way of one request, from bytes to bytes. Control flow only: what each step does lives in its own file.

pub mod receipt;
pub mod session_key;
pub mod single_flight;
pub mod steering;
