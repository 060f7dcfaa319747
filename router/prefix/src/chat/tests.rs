use super::*;

fn json(text: &str) -> Value {
    serde_json::from_str::<TemplateValue>(text).unwrap().0
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
fn content_is_converted_to_the_format_the_template_expects() {
    let text = r#"{"role":"user","content":"a"}"#;
    check(text, ContentFormat::Text, text);
    check(text, ContentFormat::Parts, r#"{"role":"user","content":[{"type":"text","text":"a"}]}"#);
    let parts = r#"{"role":"user","content":[{"type":"text","text":"a"},"b","",{"type":"input_text","text":"c","x":1},{"type":"text"},{"type":"refusal","refusal":"d"},{"type":"text","text":""}]}"#;
    check(parts, ContentFormat::Text, r#"{"role":"user","content":"a\nb\nc\nd"}"#);
    check(
        parts,
        ContentFormat::Parts,
        r#"{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"},{"type":"text","text":""},{"type":"text","text":"c"},{"type":"text","text":"d"},{"type":"text","text":""}]}"#,
    );
}

#[test]
fn missing_content_becomes_empty_in_both_formats() {
    for message in [r#"{"role":"user","content":null}"#, r#"{"role":"user"}"#] {
        check(message, ContentFormat::Text, r#"{"role":"user","content":""}"#);
        check(message, ContentFormat::Parts, r#"{"role":"user","content":[]}"#);
    }
}

#[test]
fn tool_call_arguments_are_parsed_from_json_text() {
    let calls = |arguments: &str| {
        format!(
            r#"{{"role":"assistant","tool_calls":[{{"id":"x","function":{{"name":"f"{arguments}}},"type":"function"}}]}}"#
        )
    };
    let expect = |arguments: &str| {
        format!(
            r#"{{"role":"assistant","content":"","tool_calls":[{{"id":"x","function":{{"arguments":{arguments},"name":"f"}},"type":"function"}}]}}"#
        )
    };
    check(&calls(r#","arguments":"{\"z\":1,\"a\":[null]}""#), ContentFormat::Text, &expect(r#"{"z":1,"a":[null]}"#));
    let empty = ["", r#","arguments":"""#, r#","arguments":null"#, r#","arguments":{}"#];
    // Arguments that are not an object or not JSON are accepted: the conversation must be able to continue.
    let no_objects = [r#","arguments":"[1]""#, r#","arguments":"3""#, r#","arguments":"{""#, r#","arguments":"oops""#];
    for empty in empty.into_iter().chain(no_objects) {
        check(&calls(empty), ContentFormat::Text, &expect("{}"));
    }
    check(&calls(r#","arguments":{"k":"v"}"#), ContentFormat::Text, &expect(r#"{"k":"v"}"#));
    // Python parses these values and our parser does not.
    for unread in [r#"{\"a\":NaN}"#, r#"{\"a\":1e999}"#, r#"{\"a\":18446744073709551616}"#, r#"{\"a\":\"\\ud800\"}"#] {
        let error = shaped(&calls(&format!(r#","arguments":"{unread}""#)), ContentFormat::Text).unwrap_err();
        assert_eq!(error.reason(), FallbackReason::Malformed, "{unread}");
    }
}

#[test]
fn empty_tool_call_lists_are_dropped_and_only_assistants_may_call() {
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
fn reasoning_is_read_under_every_alias() {
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
fn fields_unknown_to_engines_are_dropped() {
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
fn invalid_messages_are_malformed_and_media_are_multimodal() {
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
fn tools_render_declared_fields_only_and_defaults_as_null() {
    let tools = r#","tools":[{"x":1,"function":{"strict":true,"parameters":{"b":1,"a":2},"name":"f","y":2},"type":"function"},{"function":{"name":"g","description":"d","strict":null},"defer_loading":true}]"#;
    let expected = r#"[{"type":"function","function":{"name":"f","description":null,"parameters":{"b":1,"a":2},"strict":true}},{"type":"function","function":{"name":"g","description":"d","parameters":null,"defer_loading":true},"defer_loading":true}]"#;
    assert_eq!(variable(tools, "tools").unwrap().to_string(), json(expected).to_string());
    assert!(variable("", "tools").unwrap().is_none());
    assert_eq!(variable(r#","tools":[]"#, "tools").unwrap().len(), Some(0));
}

#[test]
fn template_arguments_cannot_override_request_fields() {
    let body = r#","chat_template_kwargs":{"enable_thinking":false,"add_generation_prompt":false,"bos_token":"B"},"reasoning_effort":"low","documents":[{"title":"t"}]"#;
    assert_eq!(variable(body, "enable_thinking"), Some(Value::from(false)));
    assert_eq!(variable(body, "bos_token"), Some(Value::from("B")));
    assert_eq!(variable(body, "add_generation_prompt"), Some(Value::from(true)));
    assert_eq!(variable(body, "reasoning_effort"), Some(Value::from("low")));
    assert_eq!(variable(body, "documents").unwrap().to_string(), "[{'title': 't'}]");
    assert_eq!(variable("", "reasoning_effort"), None);
}

#[test]
fn reasoning_effort_sets_enable_thinking_unless_the_request_does() {
    let thinks = |body: &str| variable(body, "enable_thinking");
    assert_eq!(thinks(r#","reasoning_effort":"low""#), Some(Value::from(true)));
    assert_eq!(thinks(r#","reasoning_effort":"none""#), Some(Value::from(false)));
    assert_eq!(
        thinks(r#","reasoning_effort":"none","chat_template_kwargs":{"enable_thinking":true}"#),
        Some(Value::from(true))
    );
    assert_eq!(thinks(r#","reasoning_effort":null"#), None);
}

#[test]
fn tool_results_become_text_in_both_formats() {
    let message = r#"{"role":"tool","tool_call_id":"x","content":[{"type":"text","text":"a"},"b"]}"#;
    for format in [ContentFormat::Text, ContentFormat::Parts] {
        check(message, format, r#"{"role":"tool","content":"a\nb","tool_call_id":"x"}"#);
    }
}

#[test]
fn client_billing_line_is_dropped_from_system_texts() {
    let billed = |role: &str| format!(r#"{{"role":"{role}","content":"x-anthropic-billing-header: 1\nBe."}}"#);
    check(&billed("system"), ContentFormat::Text, r#"{"role":"system","content":"Be."}"#);
    check(&billed("user"), ContentFormat::Text, &billed("user"));
    let alone = r#"{"role":"system","content":[{"type":"text","text":"x-anthropic-billing-header"},{"type":"text","text":"Be."}]}"#;
    check(alone, ContentFormat::Parts, r#"{"role":"system","content":[{"type":"text","text":"Be."}]}"#);
}

#[test]
fn converted_tool_calls_render_the_function_name_first() {
    let body = r#"{"messages":[{"role":"assistant","tool_calls":[{"id":"x","function":{"arguments":"{}","name":"f"},"type":"function"}]}]}"#;
    let calls = |order| {
        let body = ChatBody::parse(body.as_bytes()).unwrap().with_call_order(order);
        Value::from_pairs(body.messages(ContentFormat::Text).unwrap().remove(0))
            .get_attr("tool_calls")
            .unwrap()
            .to_string()
    };
    assert_eq!(
        calls(CallFieldOrder::Declared),
        "[{'id': 'x', 'function': {'arguments': {}, 'name': 'f'}, 'type': 'function'}]"
    );
    assert_eq!(
        calls(CallFieldOrder::NameFirst),
        "[{'id': 'x', 'function': {'name': 'f', 'arguments': {}}, 'type': 'function'}]"
    );
}
