//! Differences between Python's and Rust's strings and numbers, as far as chat templates can see them.

use std::sync::Arc;

use minijinja::value::{Object, ObjectRepr, ValueKind};
use minijinja::{Error, State, Value};

/// White space of `str.isspace` and `str.strip`: Unicode's set plus the four ASCII separators.
pub(crate) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// Calls a method of Python's strings, maps or lists.
pub(crate) fn call_method(
    state: &mut State<'_, '_>,
    value: &Value,
    name: &str,
    args: &[Value],
) -> Result<Value, Error> {
    if let (Some(text), true) = (value.as_str(), args.is_empty() && value.kind() == ValueKind::String) {
        match name {
            "strip" => return Ok(Value::from(text.trim_matches(is_space))),
            "lstrip" => return Ok(Value::from(text.trim_start_matches(is_space))),
            "rstrip" => return Ok(Value::from(text.trim_end_matches(is_space))),
            "split" => return Ok(text.split(is_space).filter(|word| !word.is_empty()).map(Value::from).collect()),
            "isspace" => return Ok(Value::from(!text.is_empty() && text.chars().all(is_space))),
            _ => {}
        }
    }
    match (name, value.as_str(), args.first().and_then(Value::as_str)) {
        ("removeprefix", Some(text), Some(part)) => Ok(Value::from(text.strip_prefix(part).unwrap_or(text))),
        ("removesuffix", Some(text), Some(part)) => Ok(Value::from(text.strip_suffix(part).unwrap_or(text))),
        _ => minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args),
    }
}

/// Escapes a list's or map's text as Python prints it: characters that the engine left but `str.isprintable` denies.
/// Outside of quotes the text is plain ASCII, so only quoted text can change.
pub(crate) fn escape_unprintable(text: String) -> String {
    if text.is_ascii() {
        return text;
    }
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match u32::from(c) {
            _ if is_printable(c) => out.push(c),
            code @ 0..=0xff => out.push_str(&format!("\\x{code:02x}")),
            code @ 0x100..=0xffff => out.push_str(&format!("\\u{code:04x}")),
            code => out.push_str(&format!("\\U{code:08x}")),
        }
    }
    out
}

/// `str.isprintable`: false for separators other than the space and for the Unicode categories "other". Rust's
/// `escape_debug` uses the same table; the letter in front makes it treat combining marks as printable.
fn is_printable(c: char) -> bool {
    c.is_ascii() || format!("a{c}").escape_debug().nth(1) == Some(c)
}

/// `repr(float)`: the shortest digits that round-trip, with an exponent below 1e-4 and from 1e16 on.
pub(crate) fn float(value: f64) -> String {
    if value.is_nan() {
        return "NaN".into();
    }
    if value.is_infinite() {
        return if value > 0.0 { "Infinity" } else { "-Infinity" }.into();
    }
    let scientific = format!("{value:e}");
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    match exponent.parse::<i32>().unwrap_or(0) {
        -4..=15 => format!("{value:?}"),
        exponent if exponent < 0 => format!("{mantissa}e-{:02}", -exponent),
        exponent => format!("{mantissa}e+{exponent:02}"),
    }
}

/// A float that Python prints with an exponent. The template engine never does so for its own floats, hence a
/// separate value: printed correctly everywhere, rejected in arithmetic.
#[derive(Clone, Copy)]
pub(crate) struct ExponentFloat(pub f64);

impl ExponentFloat {
    /// Returns whether Python prints this value with an exponent.
    pub(crate) fn is_one(value: f64) -> bool {
        value != 0.0 && !(1e-4..1e16).contains(&value.abs())
    }
}

impl std::fmt::Debug for ExponentFloat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&float(self.0))
    }
}

impl Object for ExponentFloat {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn is_true(self: &Arc<Self>) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_print_like_python_repr() {
        let cases = [
            (0.0, "0.0"),
            (1.0, "1.0"),
            (-2.5, "-2.5"),
            (0.1, "0.1"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (1.5e-7, "1.5e-07"),
            (1e15, "1000000000000000.0"),
            (123_456_789_012_345_680.0, "1.2345678901234568e+17"),
            (1e16, "1e+16"),
            (1e22, "1e+22"),
            (1.7976931348623157e308, "1.7976931348623157e+308"),
            (5e-324, "5e-324"),
            (f64::NAN, "NaN"),
            (f64::NEG_INFINITY, "-Infinity"),
        ];
        for (value, expected) in cases {
            assert_eq!(float(value), expected);
        }
    }

    #[test]
    fn unprintable_characters_are_escaped_in_lists_and_maps() {
        let plain = "['é', '日本', 'e\u{301}', '👍🏽', '\u{2764}\u{fe0f}']";
        assert_eq!(escape_unprintable(plain.into()), plain);
        let text = "['\u{a0}', '\u{ad}', '\u{200d}', '\u{2028}', '\u{feff}', '\u{e000}', '\u{ffff}', '\u{e0001}']";
        let expected = r"['\xa0', '\xad', '\u200d', '\u2028', '\ufeff', '\ue000', '\uffff', '\U000e0001']";
        assert_eq!(escape_unprintable(text.into()), expected);
    }

    #[test]
    fn ascii_separators_count_as_python_white_space() {
        assert!([' ', '\t', '\n', '\u{1c}', '\u{1f}', '\u{85}', '\u{a0}', '\u{3000}'].into_iter().all(is_space));
        assert!(!['a', '\0', '\u{200b}', '\u{feff}', '\u{1b}'].into_iter().any(is_space));
    }
}
