//! What the repository's own checks share: where files lie, what the crates use, how big things are. Never used by the product.

pub mod rules;
