use bytes::Bytes;
use serde_json::{Map, Value};

use super::*;
use crate::engine_api::{Api, ClientRequestBody, LegBody, LegOptions};
use crate::scrape::EngineKind;

const CHAT: &str = r#"{"model":"m","messages":[],"stream":true,"max_tokens":9,"min_tokens":4,"temperature":0.5}"#;

fn transfer(spoken: KvConnector) -> KvTransfer {
    let place = TransferEndpoint {
        address: "http://10.0.0.7:8998".into(),
        port: 8998,
        engines: vec![(DpRank(0), "e0".into()), (DpRank(1), "e1".into())],
        role: None,
    };
    KvTransfer {
        connector: spoken,
        handshake: TransferHandshake { room: 0x1234_5678_9abc_def1, endpoint: place, rank: DpRank(1), ranks: 2 },
    }
}

fn object(leg: LegBody) -> Map<String, Value> {
    serde_json::from_slice(&leg.into_bytes()).unwrap()
}

/// Returns both legs of a chat request for this connector, without a handoff.
fn legs(spoken: KvConnector) -> [Map<String, Value>; 2] {
    let (body, options) =
        (ClientRequestBody::read(Bytes::from_static(CHAT.as_bytes())).unwrap(), LegOptions::default());
    assert_eq!(options.api, Api::Chat);
    let transfer = transfer(spoken);
    [body.prefill(&options, (&transfer, None)), body.decode(&options, (&transfer, None))].map(object)
}

#[test]
fn source_legs_never_stream_and_only_sglang_keeps_the_clients_length() {
    for spoken in KvConnector::ALL {
        let [source, target] = legs(*spoken);
        assert_eq!((&source["stream"], &target["stream"]), (&false.into(), &true.into()), "{spoken:?}");
        let expected = if *spoken == KvConnector::Sglang { 9 } else { 1 };
        assert_eq!((&source["max_tokens"], &target["max_tokens"]), (&expected.into(), &9.into()), "{spoken:?}");
        assert_eq!(source.contains_key("min_tokens"), *spoken == KvConnector::Sglang);
    }
}

#[test]
fn store_connector_adds_no_transfer_params() {
    let plain: Map<String, Value> = serde_json::from_str(CHAT).unwrap();
    for spoken in [KvConnector::None, KvConnector::SharedStore] {
        assert_eq!(legs(spoken)[1], plain);
    }
}

#[test]
fn mooncake_legs_match_the_recorded_connector() {
    // Captured from vLLM 0.32's Mooncake connector over TCP.
    let seen: Value = serde_json::json!({
        "p_params": {"do_remote_decode": true, "do_remote_prefill": false, "transfer_id": "xfer-ea64448653"},
        "d_params": {"do_remote_decode": false, "do_remote_prefill": true, "remote_bootstrap_addr": "http://10.0.0.7:8998",
                     "remote_engine_id": "e1", "transfer_id": "xfer-ea64448653"}
    });
    let renamed = |mut seen: Value| {
        seen["transfer_id"] = "xfer-123456789abcdef1".into();
        seen
    };
    let [source, target] = legs(KvConnector::Mooncake);
    assert_eq!(source["kv_transfer_params"], renamed(seen["p_params"].clone()));
    assert_eq!(target["kv_transfer_params"], renamed(seen["d_params"].clone()));
}

#[test]
fn mooncake_engines_are_looked_up_at_the_bootstrap_server() {
    let speaker = KvConnector::Mooncake.dialect();
    let asked = speaker.discovery_url("http://10.0.0.7:8000", None).unwrap();
    assert_eq!(asked, "http://10.0.0.7:8998/query");
    assert_eq!(speaker.discovery_url("http://a:1", Some("http://b:2/")).unwrap(), "http://b:2/query");
    let answer = r#"{"0":{"engine_id":"e0","worker_addr":{"0":{"0":"tcp://10.0.0.7:4"}}},"1":{"engine_id":"e1"}}"#;
    let place = speaker.parse_endpoint(&asked, answer).unwrap();
    assert_eq!((place.address.as_str(), place.engines.len()), ("http://10.0.0.7:8998", 2));
    for wrong in ["{}", "[]", "<html>", r#"{"0":{}}"#] {
        assert!(!speaker.parse_endpoint(&asked, wrong).unwrap_err().to_string().is_empty(), "{wrong}");
    }
}

#[test]
fn sglang_legs_share_a_bootstrap_room_of_the_source_rank() {
    let [source, target] = legs(KvConnector::Sglang);
    let room = source["bootstrap_room"].as_i64().unwrap();
    assert_eq!(room % 2, 1, "older engines take the rank from the room");
    for name in ["bootstrap_room", "bootstrap_host", "bootstrap_port"] {
        assert_eq!(source[name], target[name]);
    }
    assert_eq!((&target["disagg_prefill_dp_rank"], source.get("disagg_prefill_dp_rank")), (&1.into(), None));
    let mut other = transfer(KvConnector::Sglang).handshake;
    for (rank, ranks) in [(0, 0), (0, 1), (5, 1), (6, 7)] {
        (other.rank, other.ranks, other.room) = (DpRank(rank), ranks, u64::MAX);
        let fields = KvConnector::Sglang.dialect().source_fields(&other);
        let room: i64 = serde_json::from_slice(&fields[2].1).unwrap();
        assert_eq!(room % i64::from(ranks.max(1)), i64::from(rank % ranks.max(1)));
    }
}

#[test]
fn sglang_server_info_gives_bootstrap_address_and_role() {
    let speaker = KvConnector::Sglang.dialect();
    let asked = speaker.discovery_url("http://[fd00::1]:30000", None).unwrap();
    let place =
        speaker.parse_endpoint(&asked, r#"{"disaggregation_mode":"prefill","disaggregation_bootstrap_port":8997}"#);
    let expected = TransferEndpoint {
        address: "fd00::1".into(),
        port: 8997,
        role: Some(WorkerRole::Prefill),
        engines: Vec::new(),
    };
    assert_eq!(place, Ok(expected));
    let unified =
        speaker.parse_endpoint(&asked, r#"{"disaggregation_mode":"null","disaggregation_bootstrap_port":8998}"#);
    assert!(unified.unwrap_err().to_string().contains("--disaggregation-mode"));
    assert!(
        speaker
            .parse_endpoint(&asked, r#"{"disaggregation_mode":"decode"}"#)
            .unwrap_err()
            .to_string()
            .contains("bootstrap_port")
    );
}

#[test]
fn metrics_identify_the_connector() {
    let of = |page: &str| KvConnector::from_metrics(&Scrape::read(page));
    assert_eq!(of("vllm:nixl_num_failed_transfers_total{engine=\"0\"} 0.0\n"), KvConnector::Nixl);
    assert_eq!(of("vllm:num_requests_running 1\n"), KvConnector::None);
    for (kind, spoken) in
        [("unified", KvConnector::None), ("prefill", KvConnector::Sglang), ("decode", KvConnector::Sglang)]
    {
        assert_eq!(of(&format!("sglang:num_running_reqs{{engine_type=\"{kind}\",tp_rank=\"0\"}} 0.0\n")), spoken);
    }
    let bare = Scrape { engine: EngineKind::Vllm, ..Scrape::default() };
    assert!(KvConnector::Nixl.dialect().missing_requirement(&bare).unwrap().contains("--kv-transfer-config"));
}

#[test]
fn connector_fields_from_clients_never_reach_an_engine() {
    let mut json: Map<String, Value> = serde_json::from_str(CHAT).unwrap();
    let clean = json.clone();
    let names: std::collections::BTreeSet<&str> = reserved_fields().collect();
    assert!(names.contains("kv_transfer_params") && names.contains("bootstrap_room"), "{names:?}");
    json.extend(names.iter().map(|name| ((*name).to_owned(), Value::from(7))));
    let body = ClientRequestBody::read(serde_json::to_vec(&json).unwrap().into()).unwrap();
    let options = LegOptions::default();
    assert_eq!(object(body.plain(&options)), clean);
    assert_eq!(body.stripped(&options).transfer_parameters as usize, names.len());
    for spoken in KvConnector::ALL {
        assert_eq!(object(body.decode(&options, (&transfer(*spoken), None))), legs(*spoken)[1], "{spoken:?}");
    }
}

#[test]
fn bidirectional_source_leg_carries_the_returned_params_and_requests_ids() {
    let transfer = transfer(KvConnector::NixlBidirectional);
    assert_eq!(transfer.returns_kv(), ReturnsKv::WithWholeAnswers);
    let seen = r#"{"do_remote_prefill":false,"do_remote_decode":true,"remote_block_ids":[[1]],"remote_engine_id":"e","remote_request_id":"r","remote_host":"h","remote_port":1,"remote_num_tokens":9}"#;
    let answer = Bytes::from(format!(r#"{{"kv_transfer_params":{seen}}}"#));
    let readback = crate::engine_api::AnswerSummary::read(&answer).unwrap().reverse_pull;
    let options = LegOptions::default();
    let body = ClientRequestBody::read(Bytes::from_static(CHAT.as_bytes())).unwrap();
    let source = body.prefill(&options, (&transfer, readback));
    assert!(String::from_utf8_lossy(&source.clone().into_bytes()).contains(seen), "whole and unchanged");
    assert_eq!(object(source)["max_tokens"], 1);
    assert_eq!(object(body.prefill(&options, (&transfer, None)))["kv_transfer_params"]["do_remote_decode"], true);
    assert!(!object(body.decode(&options, (&transfer, None))).contains_key("return_token_ids"), "no stream tells");
    let whole = ClientRequestBody::read(CHAT.replace("true", "false").into()).unwrap();
    assert_eq!(object(whole.decode(&options, (&transfer, None)))["return_token_ids"], true);
    let messages = LegOptions { api: Api::Messages, ..LegOptions::default() };
    assert!(!object(whole.decode(&messages, (&transfer, None))).contains_key("return_token_ids"));
}
