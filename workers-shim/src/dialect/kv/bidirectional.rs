//! vLLM's NIXL connector with `bidirectional_kv_xfer`: the target's whole answer carries parameters, too, with which the
//! source leg of the next step fetches what the target has computed.
//!
//! It must be declared, and at both sides: an engine without the mode never answers a source leg that carries them, and
//! dies when its client leaves. Seen with vLLM 0.32: they fetch the first `remote_num_tokens` of any prompt, and give wrong
//! text with status 200 where it begins otherwise.

use super::{Dialect, Fields, Handoff, HandsBack, Meeting, Order, Readback, Scrape, nixl};

pub(super) struct Speaker;

impl Dialect for Speaker {
    fn order(&self) -> Option<Order> {
        nixl::Speaker.order()
    }

    fn reserved(&self) -> &'static [&'static str] {
        nixl::Speaker.reserved()
    }

    fn at_source(&self, meeting: &Meeting) -> Fields {
        nixl::Speaker.at_source(meeting)
    }

    fn at_target(&self, meeting: &Meeting, handoff: Option<Handoff>) -> Fields {
        nixl::Speaker.at_target(meeting, handoff)
    }

    fn hands_back(&self) -> HandsBack {
        HandsBack::WithWholeAnswers
    }

    fn read_back(&self, readback: Readback) -> Fields {
        vec![("kv_transfer_params", readback.into_parameters().to_vec())]
    }

    fn missing(&self, page: &Scrape) -> Option<&'static str> {
        nixl::Speaker.missing(page)
    }
}
