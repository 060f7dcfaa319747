//! Rules of the repository. Each file holds one kind; none writes anything.

mod budget;
mod circles;
mod configs;
mod dependencies;
mod layering;
mod links;
mod names;
mod sizes;
mod tidy;
