//! A store that workers share (vLLM's ExampleConnector, LMCache, Mooncake's store): the source writes what it computes,
//! the target reads what it finds under the same prompt. No parameters, and nothing to be found means that it computes.

use super::{ConnectorProtocol, LegOrder};

pub(super) struct StoreConnector;

impl ConnectorProtocol for StoreConnector {
    fn leg_order(&self) -> Option<LegOrder> {
        Some(LegOrder::Stored)
    }
}
