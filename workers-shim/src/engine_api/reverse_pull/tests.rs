use serde_json::{Value, json};

use super::*;
use crate::engine_api::{AnswerSummary, SseFilter};

/// Captured from vLLM 0.32's NIXL connector in bidirectional mode: the parameters in a target's answer.
const SEEN: &str = r#"{"do_remote_prefill":false,"do_remote_decode":true,"remote_block_ids":[[72,73,74]],"remote_engine_id":"1ab1c060-a51b-4ec0-a69b-767adde7a433","remote_request_id":"chatcmpl-s-bb0e9af5","remote_host":"127.0.0.1","remote_port":38161,"tp_size":1,"dcp_size":1,"pp_size":1,"remote_num_tokens":441,"remote_blocks_expiry_time":70008.869627154,"transfer_mode":"pull"}"#;

fn answer(parameters: &str) -> Bytes {
    let choice = r#"{"index":0,"message":{"role":"assistant","content":"a \"token_ids\" b"},"token_ids":[7,8]}"#;
    let rest = r#""prompt_token_ids":[1,2,3],"prompt_text":null"#;
    format!(r#"{{"id":"c","choices":[{choice}],{rest},"kv_transfer_params":{parameters},"metrics":null}}"#).into()
}

#[test]
fn returned_params_are_read_verbatim_and_are_no_handoff() {
    let response = AnswerSummary::read(&answer(SEEN)).unwrap();
    let readback = response.reverse_pull.unwrap();
    assert_eq!((response.handoff, readback.tokens()), (None, Tokens(441)));
    assert!(!format!("{readback:?}").contains("127.0.0.1"), "nothing of it is logged");
    assert_eq!(readback.into_parameters(), SEEN);
}

#[test]
fn params_that_would_hang_the_reader_are_ignored() {
    let without = |name: &str, value: Value| {
        let mut seen: Value = serde_json::from_str(SEEN).unwrap();
        seen[name] = value;
        AnswerSummary::read(&answer(&seen.to_string())).unwrap().reverse_pull
    };
    for name in
        ["remote_request_id", "remote_engine_id", "remote_host", "remote_port", "remote_block_ids", "remote_num_tokens"]
    {
        assert_eq!(without(name, Value::Null), None, "{name}");
    }
    for (name, value) in
        [("remote_block_ids", json!([[]])), ("remote_num_tokens", json!(0)), ("do_remote_decode", json!(false))]
    {
        assert_eq!(without(name, value), None, "{name}");
    }
    assert!(without("tp_size", json!(2)).is_some());
}

#[test]
fn token_ids_cover_prompt_and_answer_of_a_single_choice() {
    assert_eq!(answer_token_ids(&answer(SEEN)), Some(vec![1, 2, 3, 7, 8]));
    let completion = |choices: Value| answer_token_ids(json!({ "choices": choices }).to_string().as_bytes());
    let choice = json!({"text": "", "prompt_token_ids": [4], "token_ids": [5]});
    assert_eq!(completion(json!([choice])), Some(vec![4, 5]));
    assert_eq!(completion(json!([choice, choice])), None);
    assert_eq!(completion(json!([{"text": "", "prompt_token_ids": null, "token_ids": null}])), None);
}

#[test]
fn client_sees_no_params_and_only_the_token_ids_it_requested() {
    let read = |bytes: Bytes| serde_json::from_slice::<Value>(&bytes).unwrap();
    let before = read(answer(SEEN));
    let shown = read(redact_answer(&answer(SEEN), ClientTokenIdVisibility::All));
    assert_eq!(shown, {
        let mut shown = before.clone();
        shown["kv_transfer_params"] = Value::Null;
        shown
    });
    let hidden = read(redact_answer(&answer(SEEN), ClientTokenIdVisibility::None));
    assert_eq!((&hidden["prompt_token_ids"], &hidden["choices"][0]["token_ids"]), (&Value::Null, &Value::Null));
    assert_eq!(hidden["choices"][0]["message"], before["choices"][0]["message"]);
    let twice = Bytes::from_static(br#"{"kv_transfer_params":{"remote_host":"10.0.0.7"},"kv_transfer_params":null}"#);
    assert_eq!(redact_answer(&twice, ClientTokenIdVisibility::All), br#"{"kv_transfer_params":null}"#[..]);
    let plain = Bytes::from_static(br#"{"id": "c", "choices": [ {"token_ids":null}],"kv_transfer_params":null}"#);
    assert_eq!(redact_answer(&plain, ClientTokenIdVisibility::All), plain, "byte for byte");
}

#[test]
fn final_event_of_a_streamed_response_omits_the_params() {
    let head = "event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"id\":\"r\"}}\n\n";
    let last = |parameters: &str| {
        format!(
            "event: response.completed\ndata: {{\"type\":\"response.completed\",\"response\":{{\"id\":\"r\",\"kv_transfer_params\":{parameters},\"usage\":{{\"input_tokens\":3,\"output_tokens\":2}}}}}}\n\n"
        )
    };
    let mut scanner = SseFilter::new();
    let mut out = Vec::new();
    scanner.push(format!("{head}{}", last(SEEN)).into(), &mut out).unwrap();
    assert_eq!(String::from_utf8(out.concat()).unwrap(), format!("{head}{}", last("null")));
    assert!(scanner.facts().done && scanner.facts().usage.is_some());
    // The engine's connection ends within the blank line.
    let (mut scanner, mut out) = (SseFilter::new(), Vec::new());
    scanner.push(last(SEEN).trim_end().to_owned().into(), &mut out).unwrap();
    out.extend(scanner.finish());
    assert_eq!(String::from_utf8(out.concat()).unwrap(), last("null").trim_end());
}

#[test]
fn only_data_lines_with_transfer_parameters_change() {
    let unchanged = b"data: {\"choices\":[]}\r\nid: \"kv_transfer_params\"\r\n\r\n";
    assert_eq!(redact_event(&Bytes::from_static(unchanged)), None);
    let event = b"event: a\r\ndata:{\"a\":1}\r\ndata: {\"kv_transfer_params\":{},\"b\":2} \r\n\r\n";
    let redacted = redact_event(&Bytes::from_static(event)).unwrap();
    assert_eq!(redacted, b"event: a\r\ndata:{\"a\":1}\r\ndata: {\"kv_transfer_params\":null,\"b\":2} \r\n\r\n"[..]);
}
