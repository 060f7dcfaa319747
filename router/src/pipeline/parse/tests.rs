use super::*;
use http::{HeaderMap, Method};
use std::time::Instant;
use vocabulary::TenantId;

fn parsed(endpoint: Endpoint, body: &str) -> Result<Request, ApiError> {
    let incoming = Incoming {
        id: crate::incoming::new_request_id(),
        tenant: TenantId::default(),
        method: Method::POST,
        path: endpoint.path().to_owned(),
        headers: HeaderMap::new(),
        body: body.to_owned().into(),
        arrived: Instant::now(),
        reserved: None,
        memory: None,
        adds: None,
    };
    parse(incoming, endpoint, None)
}

fn chat(fields: &str) -> Result<Request, ApiError> {
    parsed(Endpoint::ChatCompletions, &format!(r#"{{"model":"m","messages":[]{fields}}}"#))
}

#[test]
fn the_delivery_follows_stream_and_its_options() {
    assert_eq!(chat("").unwrap().delivery, Delivery::Whole);
    assert_eq!(chat(r#","stream":null"#).unwrap().delivery, Delivery::Whole);
    assert_eq!(chat(r#","stream":true"#).unwrap().delivery, Delivery::Stream { usage_wanted: false });
    let asked = chat(r#","stream":true,"stream_options":{"include_usage":true,"x":1}"#).unwrap();
    assert_eq!(asked.delivery, Delivery::Stream { usage_wanted: true });
}

#[test]
fn wrong_types_are_refused_by_name() {
    for (fields, param) in [
        (r#","stream":"yes""#, "stream"),
        (r#","max_tokens":"ten""#, "max_tokens"),
        (r#","max_completion_tokens":-1"#, "max_completion_tokens"),
        (r#","n":1.5"#, "n"),
        (r#","stream":true,"stream_options":[1]"#, "stream_options"),
    ] {
        let error = chat(fields).unwrap_err();
        assert!(matches!(&error, ApiError::BadField { param: named, .. } if named == param), "{fields}: {error}");
    }
    for (body, named) in [
        (r#"{"messages":[]}"#, "model"),
        (r#"{"model":7,"messages":[]}"#, "model"),
        (r#"{"model":"m"}"#, "messages"),
        (r#"{"model":"m","messages":"hi"}"#, "messages"),
    ] {
        let error = parsed(Endpoint::ChatCompletions, body).unwrap_err();
        assert!(matches!(&error, ApiError::BadField { param, .. } if param == named), "{body}: {error}");
    }
}

#[test]
fn what_is_not_one_object_is_not_a_request() {
    for body in ["", "[]", "{", "{} {}", r#"{"model":"a","model":"b","messages":[]}"#] {
        assert!(matches!(parsed(Endpoint::ChatCompletions, body), Err(ApiError::NotJson { .. })), "{body}");
    }
}

#[test]
fn a_lone_surrogate_in_a_message_is_left_to_the_engine() {
    let body = r#"{"model":"m","messages":[{"role":"user","content":"\ud800"}]}"#;
    assert!(parsed(Endpoint::ChatCompletions, body).is_ok());
}

#[test]
fn the_body_names_a_session_by_cache_key_then_parameters_then_metadata() {
    let name = |fields| chat(fields).unwrap().session_key.map(|key| key.name);
    assert_eq!(name(""), None);
    assert_eq!(name(r#","metadata":{"session_id":"c"}"#).as_deref(), Some("c"));
    let both = r#","metadata":{"session_id":"c"},"session_params":{"session_id":"b"}"#;
    assert_eq!(name(both).as_deref(), Some("b"));
    assert_eq!(name(r#","prompt_cache_key":"a","metadata":{"session_id":"c"}"#).as_deref(), Some("a"));
    assert_eq!(name(r#","prompt_cache_key":7,"metadata":"odd""#), None);
}

#[test]
fn several_answers_or_prompts_forbid_transfers() {
    assert_eq!(chat(r#","n":2"#).unwrap().bar, Some(TransferBar::SeveralChoices));
    assert_eq!(chat(r#","n":1"#).unwrap().bar, None);
    assert_eq!(chat(r#","prompt_logprobs":1"#).unwrap().bar, Some(TransferBar::PromptLogprobs));
    let completion =
        |prompt: &str| parsed(Endpoint::Completions, &format!(r#"{{"model":"m","prompt":{prompt}}}"#)).unwrap().bar;
    assert_eq!(completion(r#"["a"]"#), Some(TransferBar::SeveralChoices));
    assert_eq!(completion("[[1]]"), Some(TransferBar::SeveralChoices));
    assert_eq!(completion("[ 1,2]"), None);
    assert_eq!(completion(r#""a""#), None);
}

#[test]
fn log_probabilities_of_the_prompt_are_asked_for_by_themselves_or_with_its_echo() {
    let unread = |endpoint, body: &str| parsed(endpoint, body).unwrap().unread();
    let completion = |fields: &str| unread(Endpoint::Completions, &format!(r#"{{"model":"m","prompt":"a"{fields}}}"#));
    let chat = |fields: &str| chat(fields).unwrap().unread();
    for fields in [r#","prompt_logprobs":0"#, r#","prompt_logprobs":1"#, r#","echo":true,"logprobs":0"#] {
        assert_eq!(
            (completion(fields), chat(fields)),
            (Some(TransferBar::PromptLogprobs), Some(TransferBar::PromptLogprobs))
        );
    }
    for fields in ["", r#","prompt_logprobs":null"#, r#","echo":false,"logprobs":1"#, r#","logprobs":1"#] {
        assert_eq!((completion(fields), chat(fields)), (None, None), "{fields}");
    }
    let echo = r#","echo":true"#;
    assert_eq!((completion(echo), chat(echo)), (None, Some(TransferBar::PromptLogprobs)), "as vLLM takes it");
    assert_eq!(unread(Endpoint::Messages, r#"{"model":"m","messages":[],"max_tokens":1,"echo":true}"#), None);
}

#[test]
fn every_way_to_ask_for_several_answers_bars_transfers() {
    for fields in [r#","n":2"#, r#","best_of":2"#, r#","use_beam_search":true"#] {
        assert_eq!(chat(fields).unwrap().bar, Some(TransferBar::SeveralChoices), "{fields}");
    }
    assert_eq!(chat(r#","n":1,"best_of":1,"use_beam_search":false"#).unwrap().bar, None);
}

#[test]
fn a_clients_own_salt_counts_where_tenants_are_not_kept_apart_and_makes_other_blocks() {
    let body = r#"{"model":"m","prompt":"a prompt of more than one block, whatever its size is","cache_salt":"mine"}"#;
    let own = parsed(Endpoint::Completions, body).unwrap();
    assert_eq!(own.cache_salt(), Some("mine"));
    let tenant = parse(own.incoming.clone(), Endpoint::Completions, Some("theirs".into())).unwrap();
    assert_eq!(tenant.cache_salt(), Some("theirs"));
    let plain = parsed(Endpoint::Completions, &body.replace(r#","cache_salt":"mine""#, "")).unwrap();
    let model = crate::catalog::Catalog::default().model(&plain.model);
    let root = |request| {
        let request = crate::pipeline::identify::Unnamed::new(request, model.clone());
        let found = request.whole(&prefix::Trails::new(vocabulary::Bytes::ZERO), None);
        request.named(found).prefixed.prompt.chain.root
    };
    assert_ne!(root(own), root(plain));
}
