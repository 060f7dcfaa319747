//! vLLM's NIXL connector with `bidirectional_kv_xfer`: the target's whole answer carries parameters, too, with which the
//! source leg of the next step fetches what the target has computed.
//!
//! It must be declared, and at both sides: an engine without the mode never answers a source leg that carries them, and
//! dies when its client leaves. Seen with vLLM 0.32: they fetch the first `remote_num_tokens` of any prompt, and give wrong
//! text with status 200 where it begins otherwise.

use super::{ConnectorProtocol, LegFields, HandoffParams, ReturnsKv, TransferHandshake, LegOrder, ReversePullParams, Scrape, nixl};

pub(super) struct BidirectionalConnector;

impl ConnectorProtocol for BidirectionalConnector {
    fn leg_order(&self) -> Option<LegOrder> {
        nixl::NixlConnector.leg_order()
    }

    fn reserved_fields(&self) -> &'static [&'static str] {
        nixl::NixlConnector.reserved_fields()
    }

    fn source_fields(&self, meeting: &TransferHandshake) -> LegFields {
        nixl::NixlConnector.source_fields(meeting)
    }

    fn target_fields(&self, meeting: &TransferHandshake, handoff: Option<HandoffParams>) -> LegFields {
        nixl::NixlConnector.target_fields(meeting, handoff)
    }

    fn returns_kv(&self) -> ReturnsKv {
        ReturnsKv::WithWholeAnswers
    }

    fn reverse_pull_fields(&self, readback: ReversePullParams) -> LegFields {
        vec![("kv_transfer_params", readback.into_parameters().to_vec())]
    }

    fn missing_requirement(&self, page: &Scrape) -> Option<&'static str> {
        nixl::NixlConnector.missing_requirement(page)
    }
}
