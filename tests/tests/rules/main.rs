//! The repository's rules. Each file holds one kind; none of them writes anything.

mod arrows;
mod budget;
mod configs;
mod dependencies;
mod sizes;
mod tidy;
