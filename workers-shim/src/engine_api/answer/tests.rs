use super::*;

/// Returns a recorded answer of a real engine.
pub(in crate::engine_api) fn recorded(case: &str) -> Bytes {
    let find = |line: &str| {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        (line["case"] == case).then(|| Bytes::from(line["body"].as_str().unwrap().to_owned()))
    };
    include_str!("../../../testdata/vllm_answers.jsonl").lines().find_map(find).expect("a recorded case")
}

fn usage(prompt: u64, completion: u64, cached: Option<u64>) -> Option<TokenUsage> {
    Some(TokenUsage { prompt: Tokens(prompt), completion: Tokens(completion), cached: cached.map(Tokens) })
}

#[test]
fn answer_without_transfer_has_no_handoff() {
    let answer = AnswerSummary::read(&recorded("agg chat")).unwrap();
    assert_eq!(answer.id.as_deref(), Some("chatcmpl-897f304134635f35"));
    assert_eq!((answer.usage, answer.finish.as_deref()), (usage(218, 16, Some(0)), Some("length")));
    assert_eq!(answer.handoff, None);
}

#[test]
fn prefill_answers_transfer_params_are_extracted_verbatim() {
    let body = recorded("P chat");
    let handoff = AnswerSummary::read(&body).unwrap().handoff.unwrap();
    assert_eq!((handoff.tokens(), handoff.source_cached()), (Some(Tokens(218)), Some(Tokens(0))));
    let parameters = handoff.into_parameters();
    let text = std::str::from_utf8(&parameters).unwrap();
    assert!(
        text.starts_with(r#"{"do_remote_prefill":true,"#) && text.ends_with(r#""remote_prefill_cached_tokens":0}"#)
    );
    assert!(body.as_ptr_range().contains(&parameters.as_ptr()), "no copy");
}

#[test]
fn usage_and_handoff_are_read_alike_in_all_apis() {
    let messages = AnswerSummary::read(&recorded("P messages")).unwrap();
    assert_eq!(messages.usage, usage(230, 1, Some(192)), "cached tokens are counted apart there");
    assert_eq!(messages.handoff.unwrap().source_cached(), Some(Tokens(192)));
    let responses = AnswerSummary::read(&recorded("P responses")).unwrap();
    assert_eq!((responses.usage, responses.handoff.is_some()), (usage(230, 1, Some(192)), true));
}

#[test]
fn params_that_would_hang_the_consumer_are_ignored() {
    let offer = |parameters: &str| {
        let body = format!("{{\"kv_transfer_params\":{parameters}}}");
        AnswerSummary::read(&Bytes::from(body)).unwrap().handoff.is_some()
    };
    assert!(offer(r#"{"do_remote_prefill":true,"remote_request_id":"a\u0062"}"#));
    for parameters in [
        "null",
        "{}",
        "[]",
        "7",
        r#"{"do_remote_prefill":true}"#,
        r#"{"do_remote_prefill":true,"remote_request_id":""}"#,
        r#"{"do_remote_prefill":true,"remote_request_id":null}"#,
        r#"{"do_remote_prefill":false,"remote_request_id":"a"}"#,
        r#"{"remote_request_id":"a"}"#,
    ] {
        assert!(!offer(parameters), "{parameters}");
    }
}

#[test]
fn usage_may_be_partial_or_missing() {
    let read = |text: &str| AnswerSummary::read(&Bytes::copy_from_slice(text.as_bytes())).unwrap().usage;
    assert_eq!(read("{}"), None);
    assert_eq!(read(r#"{"usage":null}"#), None);
    let no_details = r#"{"usage":{"prompt_tokens":3,"completion_tokens":1,"prompt_tokens_details":null}}"#;
    assert_eq!(read(no_details), usage(3, 1, None));
    let huge = format!(
        "{{\"usage\":{{\"input_tokens\":{0},\"cache_read_input_tokens\":{0},\"cache_creation_input_tokens\":{0}}}}}",
        u64::MAX
    );
    assert_eq!(read(&huge), usage(u64::MAX, 0, Some(u64::MAX)));
}

#[test]
fn invalid_answer_is_an_error() {
    for text in ["", "<html>", "{\"usage\":[]", "[1"] {
        assert!(AnswerSummary::read(&Bytes::copy_from_slice(text.as_bytes())).is_err(), "{text:?}");
    }
}
