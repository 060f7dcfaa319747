//! Text of others, cut for messages.

/// Returns at most 200 characters of untrusted text, for use in a message.
pub fn truncated(text: &str) -> String {
    match text.char_indices().nth(200) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}
