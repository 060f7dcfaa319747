//! A worker's KV connector and its transfer endpoint.

use std::sync::Arc;

use vocabulary::{DpRank, KvLinkCapability};

use super::worker_definition::{KvExchangeSetting, LinkProfile};
use crate::engine_api::{KvConnector, KvTransfer, TransferEndpoint, TransferHandshake};
use crate::scrape::Scrape;

#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct KvConnectorCapability {
    pub(super) protocol: KvConnector,
    /// The transfer endpoint; None until known.
    pub(super) endpoint: Option<Arc<TransferEndpoint>>,
    /// Whether it only fetches and so needs no transfer endpoint.
    pub(super) fetch_only: bool,
    /// What prevents it from exchanging KV.
    pub(super) missing_requirement: Option<Arc<str>>,
}

impl KvConnectorCapability {
    /// Returns which parts of a prompt can be transferred.
    pub(super) fn transfer_scope(&self) -> KvLinkCapability {
        if self.fetch_only { KvLinkCapability::PrefixesIn } else { self.protocol.dialect().transfer_scope() }
    }

    /// Returns the worker's fabric if its transfer endpoint is known or not needed. A worker that answers no request
    /// without a transfer gets a fabric of its own instead, so that nobody exchanges KV with it.
    pub(super) fn reachable_fabric(&self, fabric: Arc<str>, endpoint: &str) -> Option<Arc<str>> {
        match (&self.endpoint, self.transfer_scope()) {
            (Some(_), _) | (None, KvLinkCapability::PrefixesIn) => Some(fabric),
            (None, KvLinkCapability::Prompts) => Some(format!("not met: {endpoint}").into()),
            (None, KvLinkCapability::Prefixes) => None,
        }
    }

    /// Returns a transfer from this worker to `target`. None if their connectors differ, or if the transfer endpoint
    /// does not list this rank.
    pub(super) fn transfer(&self, target: &Self, (rank, ranks): (DpRank, u16), room: u64) -> Option<KvTransfer> {
        let place = self.endpoint.as_deref().filter(|_| self.protocol == target.protocol)?.clone();
        self.protocol.dialect().leg_order()?;
        let is_named = place.engines.is_empty() || place.engines.iter().any(|(named, _)| *named == rank);
        is_named.then_some(KvTransfer {
            connector: self.protocol,
            handshake: TransferHandshake { room, endpoint: place, rank, ranks },
        })
    }
}

/// Returns a worker's connector: the configured one, else the one its metrics show, else NIXL if the configuration
/// alone enables KV exchange.
pub(super) fn connector_of(profile: &LinkProfile, scrape: &Scrape) -> KvConnector {
    match (profile.transfers, profile.connector, KvConnector::from_metrics(scrape)) {
        (KvExchangeSetting::Off, _, _) | (_, Some(KvConnector::None), _) => KvConnector::None,
        (_, Some(declared), _) => declared,
        (KvExchangeSetting::On, None, KvConnector::None) => KvConnector::Nixl,
        (KvExchangeSetting::Auto, None, KvConnector::None) if profile.fabric.is_some() => KvConnector::Nixl,
        (_, None, shown) => shown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(transfers: KvExchangeSetting, dialect: Option<KvConnector>, connector: Option<&'static str>) -> KvConnector {
        let profile = LinkProfile { transfers, connector: dialect, ..LinkProfile::default() };
        connector_of(&profile, &Scrape { connector, ..Scrape::default() })
    }

    #[test]
    fn rank_unknown_to_its_engine_sends_no_kv() {
        let place = |engines: &[u16]| {
            let engines = engines.iter().map(|rank| (DpRank(*rank), format!("engine-{rank}"))).collect();
            let place = Some(Arc::new(TransferEndpoint { engines, ..TransferEndpoint::default() }));
            KvConnectorCapability {
                protocol: KvConnector::Mooncake,
                endpoint: place,
                ..KvConnectorCapability::default()
            }
        };
        let to = |source: KvConnectorCapability, rank| {
            source.transfer(&place(&[0]), (DpRank(rank), 2), 7).map(|it| it.handshake.rank)
        };
        assert_eq!(to(place(&[0, 1]), 1), Some(DpRank(1)));
        assert_eq!(to(place(&[0]), 1), None);
        assert_eq!(to(place(&[]), 1), Some(DpRank(1)), "where ranks have no names");
    }

    #[test]
    fn fetch_only_worker_needs_no_endpoint_and_sends_nothing() {
        let consumer = KvConnectorCapability {
            protocol: KvConnector::Mooncake,
            fetch_only: true,
            ..KvConnectorCapability::default()
        };
        assert_eq!(consumer.reachable_fabric("f".into(), "http://a:1").as_deref(), Some("f"));
        assert!(consumer.transfer_scope().computes_prompts() && !consumer.transfer_scope().exports_kv());
        assert_eq!(consumer.transfer(&consumer, (DpRank(0), 1), 7), None);
        let producer = KvConnectorCapability { endpoint: Some(Arc::default()), fetch_only: false, ..consumer.clone() };
        assert!(producer.transfer(&consumer, (DpRank(0), 1), 7).is_some() && producer.transfer_scope().exports_kv());
        let unmet = KvConnectorCapability { endpoint: None, ..producer };
        assert_eq!(unmet.reachable_fabric("f".into(), "http://a:1"), None);
    }

    #[test]
    fn configured_connector_precedes_scraped_one_and_nixl_is_the_default() {
        use KvConnector::{Mooncake, Nixl, Sglang, SharedStore};
        assert_eq!(of(KvExchangeSetting::Auto, None, None), KvConnector::None);
        assert_eq!(of(KvExchangeSetting::Auto, None, Some("nixl")), Nixl);
        assert_eq!(of(KvExchangeSetting::Auto, None, Some("sglang")), Sglang);
        assert_eq!(of(KvExchangeSetting::Auto, Some(SharedStore), Some("nixl")), SharedStore);
        assert_eq!(of(KvExchangeSetting::Auto, Some(KvConnector::None), Some("nixl")), KvConnector::None);
        assert_eq!(of(KvExchangeSetting::On, None, None), Nixl);
        assert_eq!(of(KvExchangeSetting::On, Some(Mooncake), None), Mooncake);
        assert_eq!(of(KvExchangeSetting::Off, Some(Mooncake), Some("nixl")), KvConnector::None);
    }

    #[test]
    fn only_workers_with_the_same_reachable_connector_exchange_kv() {
        let capability = |protocol, endpoint: Option<TransferEndpoint>| KvConnectorCapability {
            protocol,
            endpoint: endpoint.map(Arc::new),
            ..KvConnectorCapability::default()
        };
        let endpoint = Some(TransferEndpoint { port: 7, ..TransferEndpoint::default() });
        let to = |source: KvConnectorCapability, target| source.transfer(&capability(target, None), (DpRank(1), 2), 9);
        let transfer = to(capability(KvConnector::Sglang, endpoint.clone()), KvConnector::Sglang).unwrap();
        assert_eq!(
            (transfer.connector, transfer.handshake.room, transfer.handshake.endpoint.port),
            (KvConnector::Sglang, 9, 7)
        );
        assert_eq!(to(capability(KvConnector::Sglang, endpoint.clone()), KvConnector::Nixl), None);
        assert_eq!(to(capability(KvConnector::Sglang, None), KvConnector::Sglang), None);
        assert_eq!(to(capability(KvConnector::None, endpoint), KvConnector::None), None);
    }
}
