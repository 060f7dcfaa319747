//! residency.
