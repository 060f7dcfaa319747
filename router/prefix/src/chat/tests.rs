use super::*;

fn json(text: &str) -> Value {
    serde_json::from_str::<JsonValue>(text).unwrap().0
}

fn shaped(message: &str, format: ContentFormat) -> Result<String, PrefixError> {
    let body = ChatBody::parse(format!(r#"{{"messages":[{message}]}}"#).as_bytes())?;
    let fields = body.messages(format)?.remove(0);
    Ok(Value::from_pairs(fields).to_string())
}

fn check(message: &str, format: ContentFormat, expected: &str) {
    assert_eq!(shaped(message, format).unwrap(), json(expected).to_string(), "{message}");
}

#[test]
fn content_takes_the_shape_that_the_template_wants() {
    let text = r#"{"role":"user","content":"a"}"#;
    check(text, ContentFormat::Text, text);
    check(text, ContentFormat::Parts, r#"{"role":"user","content":[{"type":"text","text":"a"}]}"#);
    let parts = r#"{"role":"user","content":[{"type":"text","text":"a"},"b","",{"type":"input_text","text":"c","x":1},{"type":"text"},{"type":"refusal","refusal":"d"},{"type":"text","text":""}]}"#;
    check(parts, ContentFormat::Text, r#"{"role":"user","content":"a\nb\nc\nd"}"#);
    check(
        parts,
        ContentFormat::Parts,
        r#"{"role":"user","content":[{"type":"text","text":"a"},"b",{"type":"text","text":"c"},{"type":"text","text":"d"},{"type":"text","text":""}]}"#,
    );
}

#[test]
fn missing_content_is_empty_in_either_shape() {
    for message in [r#"{"role":"user","content":null}"#, r#"{"role":"user"}"#] {
        check(message, ContentFormat::Text, r#"{"role":"user","content":""}"#);
        check(message, ContentFormat::Parts, r#"{"role":"user","content":[]}"#);
    }
}

#[test]
fn tool_call_arguments_are_read_from_their_text() {
    let calls = |arguments: &str| {
        format!(
            r#"{{"role":"assistant","tool_calls":[{{"id":"x","function":{{"name":"f"{arguments}}},"type":"function"}}]}}"#
        )
    };
    let expect = |arguments: &str| {
        format!(
            r#"{{"role":"assistant","content":"","tool_calls":[{{"id":"x","function":{{"name":"f","arguments":{arguments}}},"type":"function"}}]}}"#
        )
    };
    check(&calls(r#","arguments":"{\"z\":1,\"a\":[null]}""#), ContentFormat::Text, &expect(r#"{"z":1,"a":[null]}"#));
    check(&calls(r#","arguments":"[1]""#), ContentFormat::Text, &expect("[1]"));
    for empty in ["", r#","arguments":"""#, r#","arguments":null"#, r#","arguments":{}"#] {
        check(&calls(empty), ContentFormat::Text, &expect("{}"));
    }
    check(&calls(r#","arguments":{"k":"v"}"#), ContentFormat::Text, &expect(r#"{"k":"v"}"#));
    assert_eq!(
        shaped(&calls(r#","arguments":"{""#), ContentFormat::Text).unwrap_err().reason(),
        FallbackReason::Malformed
    );
}

#[test]
fn an_empty_list_of_tool_calls_is_dropped_and_only_assistants_call() {
    check(
        r#"{"role":"assistant","content":"a","tool_calls":[]}"#,
        ContentFormat::Text,
        r#"{"role":"assistant","content":"a"}"#,
    );
    check(
        r#"{"role":"assistant","content":"a","tool_calls":null}"#,
        ContentFormat::Text,
        r#"{"role":"assistant","content":"a"}"#,
    );
    check(
        r#"{"role":"user","content":"a","tool_calls":[{"function":{"name":"f"}}]}"#,
        ContentFormat::Text,
        r#"{"role":"user","content":"a"}"#,
    );
}

#[test]
fn reasoning_goes_by_all_its_names() {
    let expected = r#"{"thinking":"t","role":"assistant","content":"a","reasoning":"t","reasoning_content":"t"}"#;
    check(r#"{"role":"assistant","content":"a","reasoning":"t"}"#, ContentFormat::Text, expected);
    check(r#"{"role":"assistant","content":"a","reasoning_content":"t"}"#, ContentFormat::Text, expected);
    check(
        r#"{"role":"assistant","content":"a","reasoning":null}"#,
        ContentFormat::Text,
        r#"{"role":"assistant","content":"a"}"#,
    );
    check(r#"{"role":"user","content":"a","reasoning":"t"}"#, ContentFormat::Text, r#"{"role":"user","content":"a"}"#);
}

#[test]
fn fields_that_engines_do_not_pass_on_are_dropped() {
    check(
        r#"{"role":"tool","content":"a","tool_call_id":"x","name":"n","extra":1,"cache_control":{"type":"ephemeral"}}"#,
        ContentFormat::Text,
        r#"{"role":"tool","content":"a","tool_call_id":"x","name":"n"}"#,
    );
    check(
        r#"{"role":"user","content":"a","tool_call_id":"x","name":5}"#,
        ContentFormat::Text,
        r#"{"role":"user","content":"a"}"#,
    );
}

#[test]
fn messages_that_no_engine_takes_are_malformed_and_media_are_told_apart() {
    let reason = |message: &str| shaped(message, ContentFormat::Parts).unwrap_err().reason();
    for message in [
        r#"{"content":"a"}"#,
        r#"{"role":5}"#,
        r#"{"role":"user","content":{"type":"text"}}"#,
        r#"{"role":"user","content":[5]}"#,
        r#"{"role":"user","content":[{"text":"a"}]}"#,
        r#"{"role":"user","content":[{"type":"text","text":5}]}"#,
        r#"{"role":"user","content":[{"type":"input_text"}]}"#,
        r#"{"role":"user","role":"user"}"#,
        r#"{"role":"assistant","tool_calls":[{}]}"#,
        r#"{"role":"assistant","tool_calls":[{"function":5}]}"#,
        r#"{"role":"assistant","tool_calls":5}"#,
        "5",
    ] {
        assert_eq!(reason(message), FallbackReason::Malformed, "{message}");
    }
    for kind in ["image_url", "input_audio", "video_url", "file", "anything"] {
        let message = format!(r#"{{"role":"user","content":[{{"type":"{kind}"}}]}}"#);
        assert_eq!(reason(&message), FallbackReason::Multimodal, "{kind}");
    }
}

fn variable(body: &str, name: &str) -> Option<Value> {
    let body = ChatBody::parse(format!(r#"{{"messages":[{{"role":"user"}}]{body}}}"#).as_bytes()).unwrap();
    let variables = body.variables().unwrap();
    variables.into_iter().rev().find(|(key, _)| key.as_str() == Some(name)).map(|(_, value)| value)
}

#[test]
fn tools_print_declared_fields_first_and_missing_ones_as_null() {
    let tools = r#","tools":[{"x":1,"function":{"strict":true,"parameters":{"b":1,"a":2},"name":"f"},"type":"function"},{"function":{"name":"g","description":"d"}}]"#;
    let expected = r#"[{"type":"function","function":{"name":"f","description":null,"parameters":{"b":1,"a":2},"strict":true},"x":1},{"type":"function","function":{"name":"g","description":"d","parameters":null}}]"#;
    assert_eq!(variable(tools, "tools").unwrap().to_string(), json(expected).to_string());
    assert!(variable("", "tools").unwrap().is_none());
    assert_eq!(variable(r#","tools":[]"#, "tools").unwrap().len(), Some(0));
}

#[test]
fn template_arguments_reach_the_template_but_cannot_replace_the_request() {
    let body = r#","chat_template_kwargs":{"enable_thinking":false,"add_generation_prompt":false,"bos_token":"B"},"reasoning_effort":"low","documents":[{"title":"t"}]"#;
    assert_eq!(variable(body, "enable_thinking"), Some(Value::from(false)));
    assert_eq!(variable(body, "bos_token"), Some(Value::from("B")));
    assert_eq!(variable(body, "add_generation_prompt"), Some(Value::from(true)));
    assert_eq!(variable(body, "reasoning_effort"), Some(Value::from("low")));
    assert_eq!(variable(body, "documents").unwrap().to_string(), "[{'title': 't'}]");
    assert_eq!(variable("", "reasoning_effort"), None);
}
