//! SGLang's prefill and decode workers: both legs carry the same three fields and are sent at once. The source's
//! bootstrap server matches them by room. These workers take no other requests, and the token that the source generates
//! is the first of the answer, so both legs request the same answer length.

use serde::Deserialize;
use serde_json::json as value;
use vocabulary::WorkerRole;

use super::{
    ConnectorProtocol, ConnectorUnavailable, HandoffParams, KvLinkCapability, LegFields, LegOrder, Scrape,
    SourceAnswerLength, TransferEndpoint, TransferHandshake, json,
};

const PATH: &str = "/server_info";

pub(super) struct SglangConnector;

fn bootstrap_room(handshake: &TransferHandshake) -> u64 {
    // The room must be positive as an `i64`; older engines derive the source's rank from room modulo ranks.
    let ranks = u64::from(handshake.ranks.max(1));
    let room = (handshake.room >> 2) / ranks * ranks;
    room + u64::from(handshake.rank.0) % ranks
}

impl ConnectorProtocol for SglangConnector {
    fn leg_order(&self) -> Option<LegOrder> {
        Some(LegOrder::Concurrent)
    }

    fn transfer_scope(&self) -> KvLinkCapability {
        KvLinkCapability::Prompts
    }

    fn source_answer_length(&self) -> SourceAnswerLength {
        SourceAnswerLength::AsAsked
    }

    fn reserved_fields(&self) -> &'static [&'static str] {
        &["bootstrap_host", "bootstrap_port", "bootstrap_room", "routed_dp_rank", "disagg_prefill_dp_rank"]
    }

    fn source_fields(&self, handshake: &TransferHandshake) -> LegFields {
        vec![
            ("bootstrap_host", json(value!(handshake.endpoint.address))),
            ("bootstrap_port", json(value!(handshake.endpoint.port))),
            ("bootstrap_room", json(value!(bootstrap_room(handshake)))),
        ]
    }

    fn target_fields(&self, handshake: &TransferHandshake, _: Option<HandoffParams>) -> LegFields {
        let mut fields = self.source_fields(handshake);
        if handshake.ranks > 1 {
            fields.push(("disagg_prefill_dp_rank", json(value!(handshake.rank.0))));
        }
        fields
    }

    fn is_shown_by(&self, scrape: &Scrape) -> bool {
        scrape.connector == Some("sglang")
    }

    fn discovery_url(&self, endpoint: &str, _: Option<&str>) -> Option<String> {
        Some(format!("{endpoint}{PATH}"))
    }

    fn parse_endpoint(&self, queried_url: &str, answer: &str) -> Result<TransferEndpoint, ConnectorUnavailable> {
        let state: SglangServerState = serde_json::from_str(answer).map_err(|_| ConnectorUnavailable::NoServerInfo)?;
        let mode = state.disaggregation_mode.unwrap_or_default();
        let role = [WorkerRole::Prefill, WorkerRole::Decode].into_iter().find(|role| role.as_str() == mode);
        if role.is_none() {
            return Err(ConnectorUnavailable::Mode(mode));
        }
        let host = crate::events::host_of(queried_url).trim_matches(['[', ']']).to_owned();
        let port = state.disaggregation_bootstrap_port.ok_or(ConnectorUnavailable::NoPort)?;
        Ok(TransferEndpoint { address: host, port, role, ..TransferEndpoint::default() })
    }
}

/// The fields of `/server_info` that are read.
#[derive(Deserialize)]
struct SglangServerState {
    disaggregation_mode: Option<String>,
    disaggregation_bootstrap_port: Option<u16>,
}
