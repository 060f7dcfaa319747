//! What other nodes send, or whoever reaches the address for them.

/// A connection's bytes: the greeting, frames, and what is asked in them.
pub fn connections(bytes: &[u8]) {
    ownership::fuzz_entry::fuzz_connection(bytes);
}
