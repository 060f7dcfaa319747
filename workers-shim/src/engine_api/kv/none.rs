//! Plain OpenAI API: no transfers.

use super::{ConnectorProtocol, LegOrder};

pub(super) struct NoConnector;

impl ConnectorProtocol for NoConnector {
    fn leg_order(&self) -> Option<LegOrder> {
        None
    }
}
