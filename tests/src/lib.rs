//! Shared by the repository's own checks: file lists, crate dependencies, measures. Never used by the product.

pub mod rules;
