use serde_json::{Value, json};

use super::*;
use crate::engine_api::{AnswerSummary, KvConnector};

fn body(text: &str) -> ClientRequestBody {
    ClientRequestBody::read(Bytes::copy_from_slice(text.as_bytes())).unwrap()
}

fn text(leg: LegBody) -> String {
    String::from_utf8(leg.into_bytes().to_vec()).unwrap()
}

fn value(leg: &LegBody) -> Value {
    serde_json::from_slice(&leg.clone().into_bytes()).unwrap()
}

const PARAMETERS: &str =
    r#"{"do_remote_prefill":true, "do_remote_decode":false,"remote_block_ids":[[1,2]],"remote_request_id":"cmpl-1-x"}"#;

fn nixl() -> KvTransfer {
    KvTransfer { connector: KvConnector::Nixl, ..KvTransfer::default() }
}

fn handoff() -> HandoffParams {
    let answer = format!("{{\"id\":\"x\",\"kv_transfer_params\":{PARAMETERS}}}");
    AnswerSummary::read(&Bytes::from(answer)).unwrap().handoff.unwrap()
}

const CHAT: &str = r#"{"model":"m","messages":[{"role":"user","content":"hi \ud800"}],"stream":true,
 "stream_options":{"include_usage":false,"x":1},"max_completion_tokens":99,"min_tokens":5,"stop_token_ids":[7],"temperature":0.70,"odd":[1]}"#;

#[test]
fn plain_leg_is_the_clients_own_bytes() {
    assert_eq!(text(body(CHAT).plain(&LegOptions::default())), CHAT);
}

#[test]
fn prefill_leg_computes_one_token_and_does_not_stream() {
    let leg = body(CHAT).prefill(&LegOptions::default(), (&nixl(), None));
    let expected = json!({
        "model": "m", "messages": "", "stream": false, "max_completion_tokens": 1, "max_tokens": 1,
        "temperature": 0.7, "odd": [1], "ignore_eos": true,
        "kv_transfer_params": {"do_remote_decode": true, "do_remote_prefill": false},
    });
    let leg = text(leg);
    let messages = r#"[{"role":"user","content":"hi \ud800"}]"#;
    assert!(leg.contains(messages) && leg.contains("\"temperature\":0.70"), "{leg}");
    assert_eq!(serde_json::from_str::<Value>(&leg.replace(messages, "\"\"")).unwrap(), expected);
}

#[test]
fn each_api_bounds_length_with_its_own_field() {
    let bound = |api, request: &str| {
        let leg = value(&body(request).prefill(&LegOptions { api, ..LegOptions::default() }, (&nixl(), None)));
        let mut named: Vec<String> =
            leg.as_object().unwrap().keys().filter(|key| key.contains("max")).cloned().collect();
        named.sort();
        named
    };
    assert_eq!(bound(Api::Completions, "{}"), ["max_tokens"]);
    assert_eq!(bound(Api::Completions, r#"{"max_completion_tokens":4}"#), ["max_completion_tokens", "max_tokens"]);
    assert_eq!(bound(Api::Chat, "{}"), ["max_completion_tokens", "max_tokens"]);
    assert_eq!(bound(Api::Responses, r#"{"max_output_tokens":4}"#), ["max_output_tokens"]);
    assert_eq!(bound(Api::Messages, "{}"), ["max_tokens"]);
}

#[test]
fn decode_leg_carries_the_transfer_params_unchanged() {
    let leg = text(body(CHAT).decode(&LegOptions::default(), (&nixl(), Some(handoff()))));
    let (before, after) = CHAT.rsplit_once('}').unwrap();
    assert_eq!(leg, format!("{before},\"kv_transfer_params\":{PARAMETERS}}}{after}"));
}

#[test]
fn abandoned_decode_leg_only_fetches() {
    let request = body(&CHAT.replace("\\ud800", ""));
    let leg = value(&request.decode_abandoned(&LegOptions::default(), (&nixl(), handoff())));
    let of = |name: &str| leg.get(name).cloned();
    assert_eq!(
        (of("max_tokens"), of("max_completion_tokens"), of("stream")),
        (Some(1.into()), Some(1.into()), Some(false.into()))
    );
    assert_eq!((of("min_tokens"), of("stream_options")), (None, None));
    assert_eq!(of("kv_transfer_params"), serde_json::from_str(PARAMETERS).unwrap());
}

#[test]
fn router_only_fields_are_stripped_and_counted() {
    let smuggled = r#"{"kv_tr\u0061nsfer_params":{"do_remote_prefill":true},"a":1,
        "vllm_xargs":{"kv_cache_report_mode":"full","kv_transfer_params":{},"own":2}}"#;
    let request = body(smuggled);
    assert_eq!(value(&request.plain(&LegOptions::default())), json!({"a": 1, "vllm_xargs": {"own": 2}}));
    let leg = value(&request.prefill(&LegOptions::default(), (&nixl(), None)));
    assert_eq!(leg["kv_transfer_params"], json!({"do_remote_decode": true, "do_remote_prefill": false}));
    let stripped = StrippedFieldCounts { transfer_parameters: 2, report_mode: 1, ..StrippedFieldCounts::default() };
    assert_eq!(request.stripped(&LegOptions::default()), stripped);
    assert_eq!(body(CHAT).stripped(&LegOptions::default()), StrippedFieldCounts::default());
}

#[test]
fn shared_engines_strip_request_ids_and_priority() {
    let options = LegOptions { salt: Some("5a".into()), ..LegOptions::default() };
    let naming =
        r#"{"request_id":"resp_1","requ\u0065st_id":"resp_2","r\u0069d":["x"],"a":1,"priority":-9,"priority":null}"#;
    let request = body(naming);
    assert_eq!(value(&request.plain(&options)), json!({"a": 1, "cache_salt": "5a"}));
    let legs = [request.prefill(&options, (&nixl(), None)), request.decode(&options, (&nixl(), Some(handoff())))];
    for leg in legs.iter().map(value) {
        assert_eq!(CROSS_TENANT_FIELDS.map(|name| leg.get(name).cloned()), [None, None, None], "{leg}");
    }
    let stripped = StrippedFieldCounts { request_ids: 2, priority: 1, ..StrippedFieldCounts::default() };
    assert_eq!(request.stripped(&options), stripped);
    assert_eq!(text(request.plain(&LegOptions::default())), naming, "alone, a client may name its requests");
    assert_eq!(request.stripped(&LegOptions::default()), StrippedFieldCounts::default());
}

#[test]
fn tenant_salt_replaces_the_clients() {
    let options = LegOptions { salt: Some("5a\"".into()), ..LegOptions::default() };
    let salted = body(r#"{"cache_salt":"mine","a":1}"#);
    assert_eq!(text(salted.plain(&options)), r#"{"cache_salt":"5a\"","a":1}"#);
    assert_eq!(text(body(r#"{"a":1}"#).plain(&options)), r#"{"a":1,"cache_salt":"5a\""}"#);
    assert_eq!((salted.stripped(&options).salt, salted.stripped(&LegOptions::default()).salt), (1, 0));
    assert_eq!(text(salted.plain(&LegOptions::default())), r#"{"cache_salt":"mine","a":1}"#);
}

#[test]
fn usage_is_requested_only_in_streams_and_keeps_other_options() {
    let options = LegOptions { usage: UsageEventMode::Always, ..LegOptions::default() };
    let asked = |request: &str| value(&body(request).plain(&options)).get("stream_options").cloned();
    let chat = CHAT.replace("\\ud800", "");
    assert_eq!(asked(&chat), Some(json!({"include_usage": true, "x": 1})));
    assert_eq!(asked(r#"{"stream":true}"#), Some(json!({"include_usage": true})));
    assert_eq!(asked(r#"{"stream":true,"stream_options":null}"#), Some(json!({"include_usage": true})));
    assert_eq!(asked(r#"{"stream":false}"#), None);
    assert_eq!(asked("{}"), None);
}

#[test]
fn routing_fields_must_not_repeat() {
    for name in UNIQUE_FIELDS {
        let twice = Bytes::from(format!("{{\"{name}\":1,\"{name}\":2}}"));
        let error = ClientRequestBody::read(twice).unwrap_err();
        assert_eq!(error, JsonError::Duplicate { name: name.into() });
    }
    assert!(
        ClientRequestBody::read(Bytes::from_static(br#"{"vllm_xargs":7}"#)).is_ok(),
        "types are the engine's business"
    );
}

#[test]
fn continuation_is_a_token_id_completion_with_the_same_sampling() {
    let chat = r#"{"model":"m","messages":[{"role":"user","content":"q"}],"tools":[],"max_completion_tokens":9,"min_tokens":2,"seed":3,"temperature":0.5,"stream":true,"add_generation_prompt":true,"logprobs":false,"stop_token_ids":[4]}"#;
    let going = |text: &str, api, context| {
        let at = AnswerContinuation { prompt: &[1, 2], answer: &[30, 40, 50], context };
        body(text).continuation(api, at)
    };
    let options = LegOptions {
        api: Api::Completions,
        usage: UsageEventMode::Always,
        ids: AnswerTokenIdsMode::Always,
        salt: Some("5a".into()),
    };
    let leg = value(&going(chat, Api::Chat, None).unwrap().plain(&options));
    let expected = json!({
        "model": "m", "prompt": [1, 2, 30, 40, 50], "max_tokens": 6, "min_tokens": 0, "seed": 3, "temperature": 0.5, "stream": true,
        "stop_token_ids": [4], "return_token_ids": true, "stream_options": {"include_usage": true}, "cache_salt": "5a"
    });
    assert_eq!(leg, expected);
    let bound =
        |text, api, context| going(text, api, context).map(|body| value(&body.plain(&options))["max_tokens"].clone());
    assert_eq!(bound(r#"{"prompt":"q"}"#, Api::Completions, None), Some(13.into()), "vLLM's own bound is 16");
    assert_eq!(bound(r#"{"messages":[]}"#, Api::Chat, Some(vocabulary::Tokens(100))), Some(95.into()));
    assert_eq!(bound(r#"{"messages":[]}"#, Api::Chat, None), None, "nobody knows how long it may be");
}
