//! A KV store that workers share (vLLM's ExampleConnector, LMCache, Mooncake Store): the source writes the KV it
//! computes, the target reads what it finds for the same prompt. There are no parameters; on a miss the target
//! computes.

use super::{ConnectorProtocol, LegOrder};

pub(super) struct SharedStoreConnector;

impl ConnectorProtocol for SharedStoreConnector {
    fn leg_order(&self) -> Option<LegOrder> {
        Some(LegOrder::Stored)
    }
}
