//! Plain OpenAI API: no transfers.

use super::{ConnectorProtocol, LegOrder};

pub(super) struct PlainConnector;

impl ConnectorProtocol for PlainConnector {
    fn leg_order(&self) -> Option<LegOrder> {
        None
    }
}
