//! vLLM's NIXL connector: the source's answer contains parameters, which are sent to the target unchanged and exactly
//! once.
//!
//! Without parameters the target computes the prompt. Observed with vLLM 0.32: parameters of another prompt, or used
//! twice, yield wrong text with status 200.

use super::{ConnectorProtocol, LegFields, HandoffParams, TransferHandshake, LegOrder, Scrape};
use crate::scrape::EngineKind;

pub(super) struct NixlConnector;

impl ConnectorProtocol for NixlConnector {
    fn leg_order(&self) -> Option<LegOrder> {
        Some(LegOrder::SourceFirst)
    }

    fn reserved_fields(&self) -> &'static [&'static str] {
        &["kv_transfer_params"]
    }

    fn source_fields(&self, _: &TransferHandshake) -> LegFields {
        vec![("kv_transfer_params", br#"{"do_remote_decode":true,"do_remote_prefill":false}"#.to_vec())]
    }

    fn target_fields(&self, _: &TransferHandshake, handoff: Option<HandoffParams>) -> LegFields {
        handoff.into_iter().map(|handoff| ("kv_transfer_params", handoff.into_parameters().to_vec())).collect()
    }

    fn is_shown_by(&self, scrape: &Scrape) -> bool {
        scrape.connector == Some("nixl")
    }

    fn missing_requirement(&self, scrape: &Scrape) -> Option<&'static str> {
        let lacks = scrape.engine == EngineKind::Vllm && !self.is_shown_by(scrape);
        lacks.then_some("its metrics show no NIXL connector: start it with --kv-transfer-config '{\"kv_connector\":\"NixlConnector\",\"kv_role\":\"kv_both\"}'")
    }
}
