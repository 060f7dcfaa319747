//! Where a TOML text is wrong, in words that never quote it.

/// Where a parser stumbled, both from 1.
pub fn line_and_column(text: &str, error: &toml::de::Error) -> (usize, usize) {
    let at = text.floor_char_boundary(error.span().map_or(0, |span| span.start));
    let begin = text[..at].rfind('\n').map_or(0, |end| end + 1);
    (text[..at].matches('\n').count() + 1, text[begin..at].chars().count() + 1)
}

/// Line, column and key of what is not TOML, and why. The parser's own message would quote the line, and with it a secret.
pub fn describe_toml_error(text: &str, error: &toml::de::Error) -> String {
    let (line, column) = line_and_column(text, error);
    let whole = text.lines().nth(line - 1).unwrap_or_default();
    // Only what looks like one of our settings: a line within a text may be a part of a secret.
    let is_key = |key: &&str| !key.is_empty() && key.chars().all(is_setting_char);
    let key = whole.split_once('=').map(|(key, _)| key.trim()).filter(is_key);
    let key = key.map(|key| format!(", at {key}")).unwrap_or_default();
    format!("line {line}, column {column}{key}: {}", error.message().trim())
}

/// Whether our settings have such letters in their names.
pub fn is_setting_char(c: char) -> bool {
    c.is_ascii_lowercase() || c == '_' || c == '.'
}

/// Returns serde's message without the given text, which may hold a secret, and with TOML's words in place of Rust's.
pub fn without_text(message: &str) -> String {
    let detail = ["invalid type: ", "invalid value: ", "invalid length: "].iter().find_map(|kind| {
        let (found, expected) = message.strip_prefix(kind)?.rsplit_once(", expected ")?;
        let found = match found {
            "map" => "table",
            "sequence" => "list",
            text if text.starts_with("string \"") => "text",
            other => other,
        };
        // JSON tells the position behind it.
        let (expected, position) = expected.split_at(expected.find(" at line ").unwrap_or(expected.len()));
        Some(format!("{kind}{found}, expected {}{position}", expected_in_words(expected)))
    });
    detail.unwrap_or_else(|| message.to_owned())
}

/// The values that a `u32` accepts, as error messages name them.
pub const U32_RANGE: &str = "a whole number from 0 to 4294967295";

/// Names a type as TOML does, not as Rust does.
fn expected_in_words(expected: &str) -> &str {
    match expected {
        "a boolean" => "true or false",
        "a string" | "str" | "string" | "a borrowed string" | "path string" => "a text in quotes",
        "a sequence" => "a list",
        "a map" | "map" => "a table",
        "u8" => "a whole number from 0 to 255",
        "u16" => "a whole number from 0 to 65535",
        "u32" => U32_RANGE,
        "u64" | "usize" | "a nonzero u64" => "a whole number, not negative",
        "i8" | "i16" | "i32" | "i64" | "isize" => "a whole number",
        "f32" | "f64" => "a number",
        "variant identifier" | "string or map" | "string or table" => "a word in quotes",
        table if table.starts_with("struct ") || table.starts_with("internally tagged enum ") => "a table",
        word if word.starts_with("enum ") => "a word in quotes",
        other => other,
    }
}
