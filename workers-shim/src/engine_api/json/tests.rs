use proptest::prelude::*;

use super::*;

fn walk(text: &[u8]) -> Result<Vec<(String, String)>, JsonError> {
    let mut fields = Vec::new();
    JsonWalker::new(text).whole_object(|field| {
        let part = |range: Range<usize>| String::from_utf8(text[range].to_vec()).unwrap();
        fields.push((part(field.name), part(field.value)));
        Ok(())
    })?;
    Ok(fields)
}

#[test]
fn fields_are_returned_as_written() {
    let fields = walk(b" {\"a\" : [1, {\"a\":2}] ,\n\"b\\u0063\":\"x\\\"y\",\"d\":-0.5e+3 , \"\":null}\r\n").unwrap();
    let expected = [("a", "[1, {\"a\":2}]"), ("b\\u0063", "\"x\\\"y\""), ("d", "-0.5e+3"), ("", "null")];
    assert_eq!(fields, expected.map(|(name, value)| (name.to_owned(), value.to_owned())));
    assert_eq!(walk(b"{ }").unwrap(), []);
}

#[test]
fn malformed_json_is_refused_at_its_offset() {
    let cases: [(&str, usize); 24] = [
        ("", 0),
        ("[]", 0),
        ("null", 0),
        ("{", 1),
        ("{}x", 2),
        ("{} {}", 3),
        ("{\"a\"}", 4),
        ("{\"a\":}", 5),
        ("{\"a\":1,}", 7),
        ("{,}", 1),
        ("{a:1}", 1),
        ("{'a':1}", 1),
        ("{\"a\":1 \"b\":2}", 7),
        ("{\"a\":[1,]}", 8),
        ("{\"a\":[1 2]}", 8),
        ("{\"a\":01}", 6),
        ("{\"a\":1.}", 7),
        ("{\"a\":-}", 6),
        ("{\"a\":1e}", 7),
        ("{\"a\":tru}", 5),
        ("{\"a\":NaN}", 5),
        ("{\"a\":\"x}", 8),
        ("{\"a\":\"\\x\"}", 7),
        ("{\"a\":\"\\u12g4\"}", 7),
    ];
    for (text, at) in cases {
        match walk(text.as_bytes()) {
            Err(JsonError::Syntax { offset, .. }) => assert_eq!(offset, at, "{text:?}"),
            other => panic!("{text:?}: {other:?}"),
        }
    }
}

#[test]
fn control_characters_must_be_escaped_at_every_position() {
    for at in 0..20 {
        for control in [0u8, b'\n', 0x1f] {
            let mut text = b"{\"a\":\"12345678901234567890\"}".to_vec();
            text[6 + at] = control;
            assert!(walk(&text).is_err(), "{control} at {at}");
        }
        let mut text = b"{\"a\":\"12345678901234567890\"}".to_vec();
        text[6 + at] = 0x7f;
        assert!(walk(&text).is_ok(), "DEL is no control character to JSON");
    }
}

#[test]
fn lone_surrogates_pass_and_invalid_utf8_fails() {
    assert!(walk(br#"{"a":"\ud800 \udc00"}"#).is_ok());
    assert_eq!(walk(b"{\"a\":\"\xff\"}"), Err(JsonError::NotUtf8 { offset: 6 }));
    assert_eq!(walk(b"{\"a\":\"\xed\xa0\x80\"}"), Err(JsonError::NotUtf8 { offset: 6 }));
}

#[test]
fn nesting_is_bounded() {
    let nested = |depth: usize| format!("{{\"a\":{}1{}}}", "[".repeat(depth), "]".repeat(depth));
    assert!(walk(nested(127).as_bytes()).is_ok());
    assert!(matches!(walk(nested(128).as_bytes()), Err(JsonError::TooDeep { offset: 132 })));
    assert!(walk("{\"a\":[".repeat(1_000_000).as_bytes()).is_err(), "and the stack is safe");
}

fn json() -> impl Strategy<Value = serde_json::Value> {
    let leaf = prop_oneof![
        Just(serde_json::Value::Null),
        any::<bool>().prop_map(Into::into),
        any::<i64>().prop_map(Into::into),
        any::<f64>().prop_map(Into::into),
        any::<String>().prop_map(Into::into),
    ];
    leaf.prop_recursive(4, 40, 6, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..6).prop_map(Into::into),
            proptest::collection::vec((any::<String>(), inner), 0..6)
                .prop_map(|fields| serde_json::Value::Object(fields.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn a_run_of_plain_bytes_ends_at_the_first_other(
        plain in proptest::collection::vec(0x20u8..0x22, 0..150),
        rest in proptest::collection::vec(any::<u8>(), 0..40),
    ) {
        let text: Vec<u8> = plain.iter().map(|byte| if *byte == b'!' { 0xc3 } else { b'a' }).chain(rest).collect();
        let stop = |byte: &u8| matches!(byte, b'"' | b'\\' | 0..0x20);
        let (run, length) = (super::PlainRun::of(&text), text.iter().position(stop).unwrap_or(text.len()));
        prop_assert_eq!(run.length, length);
        prop_assert!(!run.is_ascii || text[..length].is_ascii());
    }

    #[test]
    fn json_walker_accepts_what_serde_json_accepts(
        fields in proptest::collection::vec((any::<String>(), json()), 0..5),
        cut in proptest::option::of((any::<proptest::sample::Index>(), any::<u8>())),
    ) {
        let object = serde_json::Value::Object(fields.into_iter().collect());
        let mut text = serde_json::to_vec(&object).unwrap();
        if let Some((at, byte)) = cut {
            let at = at.index(text.len());
            text[at] = byte;
        }
        // `RawValue` only checks the syntax, as the walker does.
        let other = serde_json::from_slice::<&serde_json::value::RawValue>(&text);
        let is_object = other.as_ref().is_ok_and(|raw| raw.get().trim_start().starts_with('{'));
        prop_assert_eq!(walk(&text).is_ok(), is_object && std::str::from_utf8(&text).is_ok(), "{:?}", String::from_utf8_lossy(&text));
    }
}

#[test]
fn too_many_values_are_refused_before_parsing() {
    let list = |values: usize| format!("{{\"a\":[{}0]}}", "0,".repeat(values - 2)).into_bytes();
    let walked = |text: &[u8]| JsonWalker::new(text).whole_object(|_| Ok(()));
    assert_eq!(walked(&list(3)), Ok((1, 3, 1)), "the list and what is in it");
    assert_eq!(walked(&list(MAX_VALUES)), Ok((1, MAX_VALUES, 1)));
    assert!(matches!(walked(&list(MAX_VALUES + 1)), Err(JsonError::TooManyValues { .. })));
}
