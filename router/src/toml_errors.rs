//! Where a TOML text is wrong, in words that never quote it.

/// Where a parser stumbled, both from 1.
pub(crate) fn line_and_column(text: &str, error: &toml::de::Error) -> (usize, usize) {
    let at = text.floor_char_boundary(error.span().map_or(0, |span| span.start));
    let begin = text[..at].rfind('\n').map_or(0, |end| end + 1);
    (text[..at].matches('\n').count() + 1, text[begin..at].chars().count() + 1)
}
