//! Recorded traffic for simulation in virtual time: traces of agents and chats, and what they are like.
//!
//! Pure: text and values in, figures out. Equal inputs give equal figures. It opens no file and reads no clock.

mod chance;
pub mod stats;
pub mod trace;

pub use chance::Chance;

#[cfg(test)]
mod tests;
