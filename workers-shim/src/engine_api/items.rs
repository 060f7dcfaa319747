//! Concatenates item lists of Responses inputs as text, without parsing the items.

use bytes::Bytes;

/// Returns the items of an input without the enclosing brackets; a plain string becomes one user message. None if it is
/// not a valid input.
pub fn input_items(input: &[u8]) -> Option<Bytes> {
    match input.first()? {
        b'"' => Some([b"{\"role\":\"user\",\"content\":", input, b"}"].concat().into()),
        b'[' => Some(Bytes::copy_from_slice(list_content(std::str::from_utf8(input).ok()?)?.as_bytes())),
        _ => None,
    }
}

/// Returns the text between the brackets of a JSON list.
pub fn list_content(list: &str) -> Option<&str> {
    Some(list.trim().strip_prefix('[')?.strip_suffix(']')?.trim())
}

/// Joins the contents of several lists with commas.
pub fn joined<'a>(lists: impl IntoIterator<Item = &'a [u8]>) -> Vec<u8> {
    lists.into_iter().filter(|list| !list.is_empty()).collect::<Vec<_>>().join(&b',')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_become_lists_and_lists_are_joined() {
        let of = |input: &str| input_items(input.as_bytes()).map(|items| String::from_utf8(items.to_vec()).unwrap());
        assert_eq!(of(r#""hi""#).as_deref(), Some(r#"{"role":"user","content":"hi"}"#));
        assert_eq!((of("[ 1, [2] ]").as_deref(), of("[]").as_deref()), (Some("1, [2]"), Some("")));
        assert_eq!([of("7"), of("{}"), of("null"), of("[1"), of("")], [const { None }; 5]);
        assert_eq!(joined([&b"1,2"[..], b"", b"3"]), b"1,2,3");
        assert_eq!(joined([&b""[..]]), b"");
    }
}
