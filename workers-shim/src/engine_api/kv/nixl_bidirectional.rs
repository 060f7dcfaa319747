//! vLLM's NIXL connector with `bidirectional_kv_xfer`: the target's answer (when not streamed) also contains
//! parameters, with which the source leg of the next step fetches the KV that the target computed.
//!
//! It must be configured explicitly, and on both sides: an engine without this mode never answers a source leg with
//! such parameters, and dies when its client disconnects. Observed with vLLM 0.32: the engine fetches the first
//! `remote_num_tokens` of any prompt, so a prompt that begins differently yields wrong text with status 200.

use super::{ConnectorProtocol, LegFields, HandoffParams, ReturnsKv, TransferHandshake, LegOrder, ReversePullParams, Scrape, nixl};

pub(super) struct NixlBidirectionalConnector;

impl ConnectorProtocol for NixlBidirectionalConnector {
    fn leg_order(&self) -> Option<LegOrder> {
        nixl::NixlConnector.leg_order()
    }

    fn reserved_fields(&self) -> &'static [&'static str] {
        nixl::NixlConnector.reserved_fields()
    }

    fn source_fields(&self, handshake: &TransferHandshake) -> LegFields {
        nixl::NixlConnector.source_fields(handshake)
    }

    fn target_fields(&self, handshake: &TransferHandshake, handoff: Option<HandoffParams>) -> LegFields {
        nixl::NixlConnector.target_fields(handshake, handoff)
    }

    fn returns_kv(&self) -> ReturnsKv {
        ReturnsKv::WithWholeAnswers
    }

    fn reverse_pull_fields(&self, readback: ReversePullParams) -> LegFields {
        vec![("kv_transfer_params", readback.into_parameters().to_vec())]
    }

    fn missing_requirement(&self, scrape: &Scrape) -> Option<&'static str> {
        nixl::NixlConnector.missing_requirement(scrape)
    }
}
