use super::*;
use http::{HeaderMap, Method};
use std::time::Instant;
use vocabulary::TenantId;

fn parsed(endpoint: GenerationEndpoint, body: &str) -> Result<ParsedRequest, ApiError> {
    parsed_for(None, endpoint, body)
}

fn parsed_for(salt: Option<Arc<str>>, endpoint: GenerationEndpoint, body: &str) -> Result<ParsedRequest, ApiError> {
    let incoming = ClientRequest {
        id: crate::request_id::new_request_id(),
        tenant: TenantId::default(),
        method: Method::POST,
        path: endpoint.path().to_owned(),
        headers: HeaderMap::new(),
        body: body.to_owned().into(),
        arrived: Instant::now(),
        token_reservation: None,
        memory: None,
        addition: None,
    };
    parse(incoming, endpoint, salt)
}

#[test]
fn media_ids_are_refused_where_tenants_share_engines() {
    let ask = |salt: Option<&str>, content: &str| {
        let body = format!(r#"{{"model":"m","messages":[{{"role":"user","content":{content}}}]}}"#);
        parsed_for(salt.map(Arc::from), GenerationEndpoint::ChatCompletions, &body).map(drop)
    };
    for with_id in [
        r#"[{"type":"image_url","image_url":null,"uuid":"a"}]"#,
        r#"[{"type":"text","text":"x"},{"type":"image_url","\u0075uid":"a"}]"#,
        r#"[{"type":"image_url","uuid":null,"uuid":"a"}]"#,
        r#""x","content":[{"type":"image_url","uuid":"a"}]"#,
    ] {
        assert!(ask(Some("salt"), with_id).unwrap_err().to_string().contains("uuid"), "{with_id}");
        assert!(ask(None, with_id).is_ok(), "{with_id}: a tenant alone may name its media");
    }
    for without in
        [r#""what is a uuid?""#, r#"[{"type":"text","text":"uuid"}]"#, r#"[{"type":"image_url","uuid":null}]"#, "null"]
    {
        assert!(ask(Some("salt"), without).is_ok(), "{without}");
    }
}

fn chat(fields: &str) -> Result<ParsedRequest, ApiError> {
    parsed(GenerationEndpoint::ChatCompletions, &format!(r#"{{"model":"m","messages":[]{fields}}}"#))
}

#[test]
fn response_delivery_follows_stream_and_its_options() {
    assert_eq!(chat("").unwrap().delivery, ResponseDelivery::Whole);
    assert_eq!(chat(r#","stream":null"#).unwrap().delivery, ResponseDelivery::Whole);
    assert_eq!(chat(r#","stream":true"#).unwrap().delivery, ResponseDelivery::Stream { usage_wanted: false });
    let asked = chat(r#","stream":true,"stream_options":{"include_usage":true,"x":1}"#).unwrap();
    assert_eq!(asked.delivery, ResponseDelivery::Stream { usage_wanted: true });
}

#[test]
fn fields_of_a_wrong_type_are_rejected_by_name() {
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
        let error = parsed(GenerationEndpoint::ChatCompletions, body).unwrap_err();
        assert!(matches!(&error, ApiError::BadField { param, .. } if param == named), "{body}: {error}");
    }
}

#[test]
fn a_body_that_is_not_one_object_is_rejected() {
    for body in ["", "[]", "{", "{} {}", r#"{"model":"a","model":"b","messages":[]}"#] {
        assert!(matches!(parsed(GenerationEndpoint::ChatCompletions, body), Err(ApiError::NotJson { .. })), "{body}");
    }
}

#[test]
fn a_lone_surrogate_in_a_message_is_left_to_the_engine() {
    let body = r#"{"model":"m","messages":[{"role":"user","content":"\ud800"}]}"#;
    assert!(parsed(GenerationEndpoint::ChatCompletions, body).is_ok());
}

#[test]
fn session_ids_in_the_body_prefer_cache_key_then_parameters_then_metadata() {
    let name = |fields| chat(fields).unwrap().session_key.map(|key| key.name);
    assert_eq!(name(""), None);
    assert_eq!(name(r#","metadata":{"session_id":"c"}"#).as_deref(), Some("c"));
    let both = r#","metadata":{"session_id":"c"},"session_params":{"session_id":"b"}"#;
    assert_eq!(name(both).as_deref(), Some("b"));
    assert_eq!(name(r#","prompt_cache_key":"a","metadata":{"session_id":"c"}"#).as_deref(), Some("a"));
    assert_eq!(name(r#","prompt_cache_key":7,"metadata":"odd""#), None);
}

#[test]
fn multiple_choices_or_prompts_forbid_transfers() {
    assert_eq!(chat(r#","n":2"#).unwrap().transfer_bar, Some(RequestTransferBlocker::SeveralChoices));
    assert_eq!(chat(r#","n":1"#).unwrap().transfer_bar, None);
    assert_eq!(chat(r#","prompt_logprobs":1"#).unwrap().transfer_bar, Some(RequestTransferBlocker::PromptLogprobs));
    let completion = |prompt: &str| {
        parsed(GenerationEndpoint::Completions, &format!(r#"{{"model":"m","prompt":{prompt}}}"#)).unwrap().transfer_bar
    };
    assert_eq!(completion(r#"["a"]"#), Some(RequestTransferBlocker::SeveralChoices));
    assert_eq!(completion("[[1]]"), Some(RequestTransferBlocker::SeveralChoices));
    assert_eq!(completion("[ 1,2]"), None);
    assert_eq!(completion(r#""a""#), None);
}

#[test]
fn prompt_logprobs_are_detected_directly_or_through_echo() {
    let unread = |endpoint, body: &str| parsed(endpoint, body).unwrap().cache_bypass_reason();
    let completion =
        |fields: &str| unread(GenerationEndpoint::Completions, &format!(r#"{{"model":"m","prompt":"a"{fields}}}"#));
    let chat = |fields: &str| chat(fields).unwrap().cache_bypass_reason();
    for fields in [r#","prompt_logprobs":0"#, r#","prompt_logprobs":1"#, r#","echo":true,"logprobs":0"#] {
        assert_eq!(
            (completion(fields), chat(fields)),
            (Some(RequestTransferBlocker::PromptLogprobs), Some(RequestTransferBlocker::PromptLogprobs))
        );
    }
    for fields in ["", r#","prompt_logprobs":null"#, r#","echo":false,"logprobs":1"#, r#","logprobs":1"#] {
        assert_eq!((completion(fields), chat(fields)), (None, None), "{fields}");
    }
    let echo = r#","echo":true"#;
    assert_eq!(
        (completion(echo), chat(echo)),
        (None, Some(RequestTransferBlocker::PromptLogprobs)),
        "as vLLM takes it"
    );
    assert_eq!(unread(GenerationEndpoint::Messages, r#"{"model":"m","messages":[],"max_tokens":1,"echo":true}"#), None);
}

#[test]
fn every_multiple_choice_parameter_forbids_transfers() {
    for fields in [r#","n":2"#, r#","best_of":2"#, r#","use_beam_search":true"#] {
        assert_eq!(chat(fields).unwrap().transfer_bar, Some(RequestTransferBlocker::SeveralChoices), "{fields}");
    }
    assert_eq!(chat(r#","n":1,"best_of":1,"use_beam_search":false"#).unwrap().transfer_bar, None);
}

#[test]
fn a_client_cache_salt_changes_blocks_where_tenants_are_not_separated() {
    let body = r#"{"model":"m","prompt":"a prompt of more than one block, whatever its size is","cache_salt":"mine"}"#;
    let own = parsed(GenerationEndpoint::Completions, body).unwrap();
    assert_eq!(own.cache_salt(), Some("mine"));
    let tenant = parse(own.incoming.clone(), GenerationEndpoint::Completions, Some("theirs".into())).unwrap();
    assert_eq!(tenant.cache_salt(), Some("theirs"));
    let plain = parsed(GenerationEndpoint::Completions, &body.replace(r#","cache_salt":"mine""#, "")).unwrap();
    let model = crate::catalog::Catalog::default().model(&plain.model);
    let root = |request| {
        let request = crate::pipeline::identify::IdentificationInput::new(request, model.clone());
        let found = request.compute_whole(&prefix::ConversationCache::new(vocabulary::Bytes::ZERO), None);
        request.with_prompt(found).identified.prompt.chain.root
    };
    assert_ne!(root(own), root(plain));
}
