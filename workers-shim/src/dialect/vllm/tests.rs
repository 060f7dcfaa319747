use super::*;

const PARAMETERS: &str = r#"{"do_remote_prefill":true,"remote_block_ids":[[1,2]],"remote_request_id":"cmpl-1", "remote_num_tokens":300,"remote_prefill_cached_tokens":288}"#;

fn raw(text: &str) -> Box<RawValue> {
    serde_json::from_str(text).unwrap()
}

fn shaped(body: &str) -> Shaped {
    shape(body, &Shaping::default()).unwrap()
}

#[test]
fn a_body_without_transfer_parameters_goes_on_byte_for_byte() {
    let body = "{ \"model\":\"m\",\t\"x\": [1.0, 2e3], \"messages\":[{\"content\":\"\\ud800\"}] }";
    assert_eq!(shaped(body), Shaped { body: body.into(), stripped: vec![] });
}

#[test]
fn parameters_that_only_routers_may_send_are_taken_out_and_named() {
    let body = r#"{"kv_transfer_params":{"do_remote_prefill":true},"model":"m","vllm_xargs":{"a":1,"kv_cache_report_mode":"full"}}"#;
    let Shaped { body, stripped } = shaped(body);
    assert_eq!(body, r#"{"model":"m","vllm_xargs":{"a":1}}"#);
    assert_eq!(stripped, ["kv_transfer_params", "kv_cache_report_mode"]);
    let hidden = shaped(r#"{"kv_transfer_par\u0061ms":{},"model":"m"}"#);
    assert_eq!(hidden.body, r#"{"model":"m"}"#);
}

#[test]
fn the_tenants_salt_replaces_the_clients() {
    let salted = Shaping { salt: Some("s\"1".into()), ..Shaping::default() };
    assert_eq!(shape(r#"{"cache_salt":"mine"}"#, &salted).unwrap().body, r#"{"cache_salt":"s\"1"}"#);
    assert_eq!(shape(r#"{"a":1}"#, &salted).unwrap().body, r#"{"a":1,"cache_salt":"s\"1"}"#);
    assert_eq!(shaped(r#"{"cache_salt":"mine"}"#).body, r#"{"cache_salt":"mine"}"#);
}

#[test]
fn the_usage_event_is_asked_for_beside_the_clients_other_options() {
    let asking = Shaping { usage: UsageEvent::Ask, ..Shaping::default() };
    let asked = |body: &str| shape(body, &asking).unwrap().body;
    assert_eq!(asked(r#"{"a":1}"#), r#"{"a":1,"stream_options":{"include_usage":true}}"#);
    assert_eq!(asked(r#"{"stream_options":null}"#), r#"{"stream_options":{"include_usage":true}}"#);
    assert_eq!(
        asked(r#"{"stream_options":{"x":1,"include_usage":false}}"#),
        r#"{"stream_options":{"x":1,"include_usage":true}}"#
    );
}

#[test]
fn a_prefill_leg_computes_one_token_and_keeps_the_blocks() {
    let body = r#"{"model":"m","stream":true,"stream_options":{"include_usage":true},"max_completion_tokens":90,"min_tokens":3,"temperature":0.5}"#;
    assert_eq!(
        prefill_leg(body).unwrap(),
        r#"{"model":"m","stream":false,"max_completion_tokens":1,"temperature":0.5,"max_tokens":1,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false}}"#
    );
}

#[test]
fn a_decode_leg_carries_the_parameters_unchanged_and_the_clients_sampling() {
    let body = r#"{"model":"m","stream":true,"max_tokens":7}"#;
    let leg = decode_leg(body, &raw(PARAMETERS)).unwrap();
    assert_eq!(leg, format!(r#"{{"model":"m","stream":true,"max_tokens":7,"kv_transfer_params":{PARAMETERS}}}"#));
    let release = release_leg(body, &raw(PARAMETERS)).unwrap();
    assert_eq!(release, format!(r#"{{"model":"m","stream":false,"max_tokens":1,"kv_transfer_params":{PARAMETERS}}}"#));
}

#[test]
fn both_legs_of_a_replicate_carry_the_same_token_ids() {
    let replicate = Replicate { model: "m\"x", prompt: &[1, 22, 4294967295], salt: Some("s") };
    let read = |leg: String| serde_json::from_str::<serde_json::Value>(&leg).unwrap();
    let (source, target) = (read(replicate.source_leg()), read(replicate.target_leg(&raw(PARAMETERS))));
    assert_eq!(source["prompt"], serde_json::json!([1, 22, 4294967295u32]));
    assert_eq!(source["prompt"], target["prompt"]);
    assert_eq!(
        (&source["max_tokens"], &source["model"], &source["cache_salt"]),
        (&1.into(), &"m\"x".into(), &"s".into())
    );
    assert_eq!(source["kv_transfer_params"]["do_remote_decode"], true);
    assert_eq!(target["kv_transfer_params"], read(PARAMETERS.into()));
}

#[test]
fn an_answer_gives_up_its_parameters_as_written_and_its_usage() {
    let body = format!(
        r#"{{"id":"x","choices":[],"usage":{{"prompt_tokens":300,"completion_tokens":2,"total_tokens":302,"prompt_tokens_details":{{"cached_tokens":288}}}},"kv_transfer_params":{PARAMETERS}}}"#
    );
    let answer = Answer::read(body.as_bytes());
    let parameters = answer.parameters.unwrap();
    assert_eq!(parameters.get(), PARAMETERS);
    assert!(Produced::usable(&parameters));
    assert_eq!(
        Produced::read(&parameters),
        Produced { remote_num_tokens: Some(Tokens(300)), remote_prefill_cached_tokens: Some(Tokens(288)) }
    );
    let usage = answer.usage.unwrap();
    assert_eq!(
        (usage.prompt_tokens, usage.completion_tokens, usage.cached()),
        (Tokens(300), Tokens(2), Some(Tokens(288)))
    );
}

#[test]
fn odd_answers_tell_nothing() {
    for body in ["", "[]", r#"{"kv_transfer_params":null,"usage":null}"#, r#"{"usage":7,"kv_transfer_params":[1]}"#] {
        let answer = Answer::read(body.as_bytes());
        assert!(answer.parameters.is_none() && answer.usage.is_none(), "{body}");
    }
    assert!(!Produced::usable(&raw(r#"{"do_remote_prefill":true}"#)));
    let none = Answer::read(br#"{"usage":{"prompt_tokens":5,"completion_tokens":1,"prompt_tokens_details":null}}"#);
    assert_eq!(none.usage.unwrap().cached(), None);
}
