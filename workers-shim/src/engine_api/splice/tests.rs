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
