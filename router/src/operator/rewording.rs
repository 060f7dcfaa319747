//! What the parsers of JSON and queries say of bad input, as a person would say it: without the names of Rust's types.
//!
//! What is not known here stays as it was said.

use crate::error::shortened;

/// One field's problem, with where it is.
pub(super) fn at(path: &str, said: &str) -> String {
    let told = in_words(said);
    if path.is_empty() || path == "." || told.contains(&format!("`{path}`")) { told } else { format!("{path}: {told}") }
}

/// What axum says of a query, whose fields stand in front of the problem.
pub(super) fn of_query(said: &str) -> String {
    let said = said.strip_prefix("Failed to deserialize query string: ").unwrap_or(said);
    let is_name =
        |name: &str| !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    match said.split_once(": ").filter(|(name, _)| is_name(name)) {
        Some((name, said)) => at(name, said),
        None => at("", said),
    }
}

fn in_words(said: &str) -> String {
    let said = said.rsplit_once(" at line ").map_or(said, |(said, _)| said);
    let quoted = |rest: &str| rest.split('`').nth(1).unwrap_or_default().to_owned();
    if let Some(rest) = said.strip_prefix("missing field ") {
        return format!("`{}` is missing", quoted(rest));
    }
    if let Some(rest) = said.strip_prefix("duplicate field ") {
        return format!("`{}` is given twice", quoted(rest));
    }
    for (unknown, what) in [("unknown field ", "there is no field"), ("unknown variant ", "there is no")] {
        if let Some(rest) = said.strip_prefix(unknown) {
            let accepted = rest.split_once(", ").map_or("", |(_, accepted)| accepted);
            let accepted = match accepted.strip_prefix("expected one of ").or(accepted.strip_prefix("expected ")) {
                Some(words) => format!("accepted is {}", words.replace('`', "").replace(" or ", ", ")),
                None => "none is accepted here".to_owned(),
            };
            return format!("{what} `{}`: {accepted}", quoted(rest));
        }
    }
    for given in ["invalid type: ", "invalid value: ", "invalid length "] {
        if let Some((given, expected)) = said.strip_prefix(given).and_then(|rest| rest.split_once(", expected ")) {
            return format!("{} is not accepted here: accepted is {}", value(given), kind(expected));
        }
    }
    match said {
        "invalid digit found in string" | "cannot parse integer from empty string" => {
            "accepted is a whole number".into()
        }
        "number too large to fit in target type" => "the number is too large".into(),
        "number too small to fit in target type" => "the number is too small".into(),
        "provided string was not `true` or `false`" => "accepted is true or false".into(),
        other => other.to_owned(),
    }
}

/// What was given, without the parser's name for its type.
fn value(given: &str) -> String {
    let (sort, rest) = given.split_once(' ').unwrap_or((given, ""));
    match sort {
        "null" => "null".into(),
        "map" => "an object".into(),
        "sequence" => "a list".into(),
        "string" | "integer" | "boolean" => shortened(rest.trim_matches('`')),
        "floating" => rest.trim_start_matches("point ").trim_matches('`').to_owned(),
        _ => given.replace('`', ""),
    }
}

/// What is accepted, for what the parser calls its type.
fn kind(expected: &str) -> String {
    match expected {
        "u8" => "a whole number from 0 to 255".into(),
        "u16" => "a whole number from 0 to 65535".into(),
        "u32" => "a whole number from 0 to 4294967295".into(),
        "u64" | "usize" => "a whole number from 0 on".into(),
        "i8" | "i16" | "i32" | "i64" | "isize" => "a whole number".into(),
        "f32" | "f64" => "a number".into(),
        "a boolean" => "true or false".into(),
        "a string" | "a borrowed string" | "string" => "a text".into(),
        "a sequence" => "a list".into(),
        "unit" | "unit variant" => "one of the accepted words".into(),
        other if other.starts_with("struct ") || other.starts_with("a map") => "an object".into(),
        other if other.starts_with("enum ") || other.starts_with("variant identifier") => {
            "one of the accepted words".into()
        }
        other => other.replace('`', ""),
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Deserialize, Debug)]
    #[serde(rename_all = "lowercase")]
    enum Word {
        One,
        Two,
    }

    #[derive(Deserialize, Debug)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "only read")]
    struct Asked {
        count: u32,
        word: Option<Word>,
        names: Option<Vec<String>>,
        inner: Option<Inner>,
        truth: Option<bool>,
    }

    #[derive(Deserialize, Debug)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "only read")]
    struct Inner {
        rank: u16,
    }

    fn of_body(json: &str) -> String {
        let error =
            serde_path_to_error::deserialize::<_, Asked>(&mut serde_json::Deserializer::from_str(json)).unwrap_err();
        at(&error.path().to_string(), &error.inner().to_string())
    }

    #[test]
    fn a_body_is_refused_in_words_that_name_the_field_and_what_is_accepted() {
        for (json, told) in [
            ("{}", "`count` is missing"),
            (r#"{"count": "3"}"#, "count: \"3\" is not accepted here: accepted is a whole number from 0 to 4294967295"),
            (r#"{"count": -1}"#, "count: -1 is not accepted here: accepted is a whole number from 0 to 4294967295"),
            (r#"{"count": 1.5}"#, "count: 1.5 is not accepted here: accepted is a whole number from 0 to 4294967295"),
            (r#"{"count": null}"#, "count: null is not accepted here: accepted is a whole number from 0 to 4294967295"),
            (r#"{"count": 1, "count": 2}"#, "`count` is given twice"),
            (r#"{"count": 1, "x": 2}"#, "there is no field `x`: accepted is count, word, names, inner, truth"),
            (r#"{"count": 1, "word": "three"}"#, "word: there is no `three`: accepted is one, two"),
            (r#"{"count": 1, "names": {}}"#, "names: an object is not accepted here: accepted is a list"),
            (r#"{"count": 1, "names": [7]}"#, "names[0]: 7 is not accepted here: accepted is a text"),
            (r#"{"count": 1, "inner": 7}"#, "inner: 7 is not accepted here: accepted is an object"),
            (
                r#"{"count": 1, "inner": {"rank": 99999}}"#,
                "inner.rank: 99999 is not accepted here: accepted is a whole number from 0 to 65535",
            ),
            (r#"{"count": 1, "truth": 1}"#, "truth: 1 is not accepted here: accepted is true or false"),
        ] {
            assert_eq!(of_body(json), told);
        }
    }

    #[test]
    fn a_query_is_refused_likewise() {
        for (said, told) in [
            (
                "Failed to deserialize query string: limit: invalid digit found in string",
                "limit: accepted is a whole number",
            ),
            (
                "Failed to deserialize query string: limit: number too large to fit in target type",
                "limit: the number is too large",
            ),
            (
                "Failed to deserialize query string: bounded: provided string was not `true` or `false`",
                "bounded: accepted is true or false",
            ),
            ("Failed to deserialize query string: missing field `model`", "`model` is missing"),
            (
                "Failed to deserialize query string: role: unknown variant `x`, expected `a` or `b`",
                "role: there is no `x`: accepted is a, b",
            ),
        ] {
            assert_eq!(of_query(said), told);
        }
    }

    #[test]
    fn what_is_not_known_stays_as_it_was_said() {
        assert_eq!(at("a", "out of cheese"), "a: out of cheese");
    }
}
