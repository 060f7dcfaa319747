//! vLLM's NIXL connector: the source answers with parameters, which go to the target whole and unchanged, once.
//!
//! Without the parameters the target computes. Seen with vLLM 0.32: parameters of another prompt, or used before, give
//! wrong text with status 200.

use super::{Dialect, Fields, Handoff, Meeting, Order, Scrape};
use crate::scrape::Engine;

pub(super) struct Speaker;

impl Dialect for Speaker {
    fn order(&self) -> Option<Order> {
        Some(Order::Handed)
    }

    fn reserved(&self) -> &'static [&'static str] {
        &["kv_transfer_params"]
    }

    fn at_source(&self, _: &Meeting) -> Fields {
        vec![("kv_transfer_params", br#"{"do_remote_decode":true,"do_remote_prefill":false}"#.to_vec())]
    }

    fn at_target(&self, _: &Meeting, handoff: Option<Handoff>) -> Fields {
        handoff.into_iter().map(|handoff| ("kv_transfer_params", handoff.into_parameters().to_vec())).collect()
    }

    fn shown_by(&self, page: &Scrape) -> bool {
        page.connector == Some("nixl")
    }

    fn missing(&self, page: &Scrape) -> Option<&'static str> {
        let lacks = page.engine == Engine::Vllm && !self.shown_by(page);
        lacks.then_some("its metrics show no NIXL connector: start it with --kv-transfer-config '{\"kv_connector\":\"NixlConnector\",\"kv_role\":\"kv_both\"}'")
    }
}
