//! The repository's rules. Each file holds one kind; none of them writes anything.

mod budget;
mod configs;
mod dependencies;
mod layering;
mod sizes;
mod tidy;
