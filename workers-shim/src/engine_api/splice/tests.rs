use proptest::prelude::*;

use super::*;

fn scan(text: &str) -> ScannedJson {
    ScannedJson::scan(Bytes::copy_from_slice(text.as_bytes()), &[]).unwrap()
}

fn spliced(text: &str, edit: impl FnOnce(&mut JsonSplice<'_>)) -> String {
    let fields = scan(text);
    let mut splice = JsonSplice::new(&fields);
    edit(&mut splice);
    String::from_utf8(splice.finish().to_vec()).unwrap()
}

#[test]
fn unedited_fields_stay_byte_for_byte() {
    let text = "{ \"a\":1 ,\n  \"b\" : \"\\ud800\", \"z\":1.0e0 }\n";
    assert_eq!(spliced(text, |s| s.set("b", b"2".as_slice())), "{ \"a\":1 ,\n  \"b\" : 2, \"z\":1.0e0 }\n");
    assert_eq!(
        spliced(text, |s| s.set("c", b"[3]".as_slice())),
        "{ \"a\":1 ,\n  \"b\" : \"\\ud800\", \"z\":1.0e0,\"c\":[3] }\n"
    );
    assert_eq!(spliced(text, |s| assert!(s.remove("a"))), "{ \"b\" : \"\\ud800\", \"z\":1.0e0 }\n");
    assert_eq!(spliced(text, |s| assert!(s.remove("b"))), "{ \"a\":1, \"z\":1.0e0 }\n");
    assert_eq!(spliced(text, |s| assert!(s.remove("z"))), "{ \"a\":1 ,\n  \"b\" : \"\\ud800\" }\n");
    assert_eq!(spliced(text, |s| assert!(!s.remove("y"))), text);
}

#[test]
fn objects_can_become_empty_and_be_filled() {
    assert_eq!(spliced("{}", |s| s.set("a", b"1".as_slice())), "{\"a\":1}");
    assert_eq!(spliced(" { } ", |s| s.set("a", b"1".as_slice())), " {\"a\":1 } ");
    assert_eq!(spliced("{\"a\":1}", |s| assert!(s.remove("a"))), "{}");
    let both = |s: &mut JsonSplice<'_>| {
        s.remove("a");
        s.remove("b");
        s.set("c", b"1".as_slice());
        s.set("c", b"2".as_slice());
    };
    assert_eq!(spliced("{\"a\":1, \"b\":2}", both), "{\"c\":2}");
}

#[test]
fn last_edit_of_a_field_wins() {
    let set_then_remove = |s: &mut JsonSplice<'_>| {
        s.set("a", b"2".as_slice());
        s.remove("a");
    };
    assert_eq!(spliced("{\"a\":1,\"b\":1}", set_then_remove), "{\"b\":1}");
    let remove_then_set = |s: &mut JsonSplice<'_>| {
        s.remove("a");
        s.set("a", b"2".as_slice());
    };
    assert_eq!(spliced("{\"a\":1,\"b\":1}", remove_then_set), "{\"a\":2,\"b\":1}");
}

#[test]
fn escaped_field_names_are_recognized() {
    let text = r#"{"\u0061":1,"b":2,"a\u0000":3}"#;
    assert_eq!(scan(text).get("a"), Some(b"1".as_slice()));
    assert_eq!(spliced(text, |s| assert!(s.remove("a"))), r#"{"b":2,"a\u0000":3}"#);
    let twice = ScannedJson::scan(Bytes::from_static(br#"{"a":1,"\u0061":2}"#), &["a"]);
    assert_eq!(twice.unwrap_err(), JsonError::Duplicate { name: "a".into() });
}

#[test]
fn duplicates_of_other_fields_are_allowed() {
    let text = r#"{"a":1,"b":0,"a":2}"#;
    assert_eq!(scan(text).read::<u32>("a"), Some(2));
    assert_eq!(spliced(text, |s| s.set("a", b"3".as_slice())), r#"{"b":0,"a":3}"#);
    assert_eq!(spliced(text, |s| assert!(s.remove("a"))), r#"{"b":0}"#);
}

#[test]
fn unchanged_body_shares_memory() {
    let fields = scan("{\"a\":1}");
    assert_eq!(JsonSplice::new(&fields).finish().as_ptr(), fields.body().as_ptr());
}

#[test]
fn number_of_fields_is_bounded() {
    let object = |count: usize| {
        let fields: Vec<String> = (0..count).map(|n| format!("\"f{n}\":{n}")).collect();
        Bytes::from(format!("{{{}}}", fields.join(",")))
    };
    assert!(ScannedJson::scan(object(1024), &[]).is_ok());
    assert_eq!(ScannedJson::scan(object(1025), &[]).unwrap_err(), JsonError::TooManyFields { max: 1024 });
}

#[test]
fn values_are_read_if_present_and_of_the_right_type() {
    let fields = scan(r#"{"s":true,"n":null,"t":"x"}"#);
    assert_eq!(
        (fields.read::<bool>("s"), fields.read::<bool>("n"), fields.read::<bool>("t")),
        (Some(true), None, None)
    );
    assert!(fields.has("s") && !fields.has("n") && !fields.has("q"));
}

const NAMES: [&str; 4] = ["a", "b", "c", "d"];

proptest! {
    #[test]
    fn splicing_equals_editing_a_map(
        present in proptest::sample::subsequence(NAMES.to_vec(), 0..=4).prop_shuffle(),
        edits in proptest::collection::vec((0usize..4, proptest::option::of(any::<u16>())), 0..6),
        space in "[ \n\t]{0,2}",
    ) {
        let fields: Vec<String> = present.iter().map(|name| format!("{space}\"{name}\"{space}:{space}[\"{name}\"]{space}")).collect();
        let text = format!("{space}{{{}{space}}}{space}", fields.join(","));
        let mut model: serde_json::Map<String, serde_json::Value> = serde_json::from_str(&text).unwrap();
        let result = spliced(&text, |splice| {
            for (name, value) in edits {
                let name = NAMES[name];
                match value {
                    Some(value) => {
                        splice.set(name, value.to_string().into_bytes());
                        model.insert(name.into(), value.into());
                    }
                    None => {
                        splice.remove(name);
                        model.remove(name);
                    }
                }
            }
        });
        let read: serde_json::Map<String, serde_json::Value> = serde_json::from_str(&result).unwrap();
        prop_assert_eq!(read, model, "{} became {}", text, result);
    }
}

#[test]
fn all_fields_are_listed_by_unescaped_names() {
    let body = br#"{"a":1, "\u0062" : [2] ,"\ud800":3,"a":"x"}"#;
    let fields = ScannedJson::scan(Bytes::from_static(body), &[]).unwrap();
    let all: Vec<_> = fields.all().map(|(name, value)| (name.into_owned(), &body[value])).collect();
    let known = [("a", &b"1"[..]), ("b", b"[2]"), ("\\ud800", b"3"), ("a", b"\"x\"")];
    assert_eq!(all, known.map(|(name, value)| (name.to_owned(), value)));
}

#[test]
fn overlong_field_name_is_refused_early() {
    let named = |bytes: usize| format!("{{\"\\u0061{}\":1,\"model\":\"m\"}}", "a".repeat(bytes));
    let read = |text: String| ScannedJson::scan(Bytes::from(text), &[]);
    assert!(matches!(read(named(MAX_NAME)), Err(JsonError::LongName { offset: 2, max: MAX_NAME })));
    let fits = read(named(MAX_NAME - 6)).unwrap();
    assert_eq!(fits.get("model"), Some(&b"\"m\""[..]));
}

#[test]
fn escaped_name_is_decoded_only_if_it_may_match() {
    let fields = scan("{\"\\u006dode\\u006C\":1,\"\\u006d\\u006f\\u0064\\u0065\\u006c\":2,\"\\/\":3}");
    assert_eq!(fields.positions("model").collect::<Vec<_>>(), [0, 1]);
    assert_eq!(fields.get("/"), Some(&b"3"[..]));
    assert_eq!(fields.get("mode"), None);
}

#[test]
fn a_field_with_a_media_part_is_told_from_one_with_text_about_it() {
    let names = |content: &str| {
        let body =
            format!(r#"{{"tools":[{{"name":"image"}}],"messages":[{{"role":"user","content":{content}}}],"n":1}}"#);
        let scanned = ScannedJson::scan(body.into(), &[]).unwrap();
        assert!(scanned.names_media("tools") && !scanned.names_media("n") && !scanned.names_media("absent"));
        scanned.names_media("messages")
    };
    for part in [r#"[{"type":"image_url"}]"#, r#"[{"x_url":1}]"#, r#"[[{"input_audio":{}}]]"#, r#""file""#] {
        assert!(names(part), "{part}");
    }
    for text in [r#""say \"image\" or \"x_url\" once""#, r#"[{"type":"text","text":"an image"}]"#] {
        assert!(!names(text), "{text}");
    }
}

fn by_growth(text: &str, known: &str) -> Option<Result<ScannedJson, JsonError>> {
    let known = Arc::new(ScannedJson::scan(Bytes::copy_from_slice(known.as_bytes()), &[]).ok()?);
    let growth = known.growth_to(text.as_bytes(), "m")?;
    Some(ScannedJson::scan_growth(Bytes::copy_from_slice(text.as_bytes()), &growth, &["n"]))
}

fn by_whole(text: &str) -> Result<ScannedJson, JsonError> {
    ScannedJson::scan(Bytes::copy_from_slice(text.as_bytes()), &["n"])
}

#[test]
fn a_grown_body_is_scanned_from_the_end_of_its_known_list() {
    let known = r#"{"a":[1],"m":[{"b":[]}, 12 ],"n":1}"#;
    for grown in [
        known,
        r#"{"a":[1],"m":[{"b":[]}, 12,"image_url",[2]]}"#,
        r#"{"a":[1],"m":[{"b":[]}, 12 , {}],"n":2,"o":[3] }"#,
        r#"{"a":[1],"m":[{"b":[]}, 12] x"#,
        r#"{"a":[1],"m":[{"b":[]}, 12 13]}"#,
        r#"{"a":[1],"m":[{"b":[]}, 12,{"c":"é"}],"n":1,"n":2}"#,
    ] {
        assert_eq!(by_growth(grown, known), Some(by_whole(grown)), "{grown}");
    }
    for other in
        [r#"{"a":[1],"m":[{"b":[]}, 123]}"#, r#"{"a":[1],"m":[{"b":[]}, 12"#, r#"{"a":[2],"m":[{"b":[]}, 12]}"#]
    {
        assert_eq!(by_growth(other, known), None, "{other}");
    }
    assert_eq!(by_growth(r#"{"m":[1]}"#, r#"{"m":[]}"#), None, "an empty list has no element to go on from");
    assert_eq!(by_growth(r#"{"m":{}}"#, r#"{"m":{}}"#), None);
}

/// JSON values, and a few texts that are none.
fn value() -> impl Strategy<Value = String> {
    let leaf = prop_oneof![
        Just("1".to_owned()),
        Just("-2.5e3".to_owned()),
        Just("null".to_owned()),
        Just("\"image_url\"".to_owned()),
        Just("\"é\\\"]}\"".to_owned()),
        Just("\"".to_owned()),
        Just("[".to_owned()),
        Just(String::new()),
    ];
    leaf.prop_recursive(3, 12, 3, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..3).prop_map(|values| format!("[{}]", values.join(", "))),
            proptest::collection::vec(inner, 0..3).prop_map(|values| format!(
                "{{{}}}",
                values.iter().map(|v| format!("\"k\":{v}")).collect::<Vec<_>>().join(",")
            )),
        ]
    })
}

fn object() -> impl Strategy<Value = String> {
    let list = |values: Vec<String>| format!("[{}]", values.join(","));
    let fields = (value(), proptest::collection::vec(value(), 0..5), value());
    fields
        .prop_map(move |(before, messages, after)| format!("{{\"a\":{before},\"m\":{},\"n\":{after}}}", list(messages)))
}

proptest! {
    #[test]
    fn growth_finds_what_a_whole_scan_finds(
        known in object(),
        other in object(),
        (cut, from) in (any::<proptest::sample::Index>(), any::<proptest::sample::Index>()),
    ) {
        // A text that begins like `known` and goes on like `other`.
        let boundary = |text: &str, at: usize| (0..=at).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        let cut = boundary(&known, cut.index(known.len()));
        let grown = format!("{}{}", &known[..cut], &other[boundary(&other, from.index(other.len()))..]);
        for text in [&grown, &known, &other] {
            if let Some(found) = by_growth(text, &known) {
                prop_assert_eq!(found, by_whole(text), "{} after {}", text, &known);
            }
        }
    }
}

#[test]
fn long_unchanged_parts_of_a_body_are_not_copied() {
    let (long, longer) = ("x".repeat(MIN_SHARED), "y".repeat(2 * MIN_SHARED));
    let scanned = scan(&format!("{{\"a\":1,\"m\":\"{long}\" ,\"b\":2, \"n\":\"{longer}\"}}"));
    let mut splice = JsonSplice::new(&scanned);
    splice.remove("a");
    splice.set("b", b"3".as_slice());
    splice.set("c", b"[4]".as_slice());
    let leg = splice.chunks();
    assert!(leg.copied_bytes() < 32, "{} bytes are copied", leg.copied_bytes());
    let expected = format!("{{\"m\":\"{long}\" ,\"b\":3, \"n\":\"{longer}\",\"c\":[4]}}");
    assert_eq!(leg.clone().into_bytes(), expected);
    let shared = scanned.body().as_ptr_range();
    let lengths: Vec<_> =
        leg.into_chunks().iter().filter(|chunk| shared.contains(&chunk.as_ptr())).map(Bytes::len).collect();
    assert!(lengths.len() == 2 && lengths.iter().sum::<usize>() > 3 * MIN_SHARED, "{lengths:?}");
    let unchanged = JsonSplice::new(&scanned).chunks();
    assert_eq!((unchanged.copied_bytes(), unchanged.into_chunks()), (0, vec![scanned.body().clone()]));
}
