//! A worker's KV link: with whom it exchanges KV, and the estimated cost. Pure.
//!
//! Two workers exchange KV when their fabrics are equal, so a fabric names all that must be equal at both ends:
//! connector, engine version, KV precision, block size and model. Unknown parts are `?`.
//!
//! A transfer of n bytes takes `fixed + n / rate`. A transfer whose bytes are expected to take longer than `fixed`
//! updates the rate with `n / (time - fixed)`, a smaller one updates `fixed` with `time - n / rate`. Both are averaged
//! as speeds are.

use std::sync::Arc;

use vocabulary::{Bytes, KvLink, KvLinkCapability, Micros, ModelId};

use super::estimate::{Confidence, LogMovingAverage};
use super::kv_connector::connector_of;
use super::worker_definition::LinkProfile;
use crate::engine_api::KvConnector;
use crate::scrape::Scrape;

/// Maximum length of one part of a fabric's name; longer ones are truncated.
const MAX_NAME_BYTES: usize = 64;
/// Upper limit of the estimate, faster than any link.
const MAX_BYTES_PER_SECOND: f64 = 1e15;

/// Estimated cost of transfers to one worker.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct LinkEstimate {
    fixed: LogMovingAverage,
    rate: LogMovingAverage,
}

impl LinkEstimate {
    pub(super) fn new(start: &LinkProfile) -> Self {
        Self {
            fixed: LogMovingAverage::new(start.latency.0 as f64, f64::MAX),
            rate: LogMovingAverage::new(start.bandwidth, MAX_BYTES_PER_SECOND),
        }
    }

    /// Updates the estimate with a transfer.
    pub(super) fn observe(&mut self, bytes: Bytes, took: Micros) {
        if bytes == Bytes::ZERO || took == Micros::ZERO {
            return;
        }
        let (bytes, took) = (bytes.0 as f64, took.0 as f64);
        let (fixed, moving) = (self.fixed.value(), bytes * 1e6 / self.rate.value());
        if moving > fixed {
            self.rate.learn(bytes * 1e6 / (took - fixed).max(took / 4.0));
        } else {
            self.fixed.learn((took - moving).max(1.0));
        }
    }

    /// Returns the confidence in the fixed cost and in the rate.
    pub(super) fn confidence(&self) -> (Confidence, Confidence) {
        (self.fixed.confidence(), self.rate.confidence())
    }

    /// Returns the estimate as a link of `fabric`.
    pub(super) fn link(&self, fabric: Arc<str>, link_mode: KvLinkCapability) -> KvLink {
        let fixed = Micros(self.fixed.value().round() as u64);
        KvLink { fabric, fixed, bytes_per_second: self.rate.value(), carries: link_mode }
    }
}

/// Returns the worker's fabric; None if it exchanges no KV. `models` are the served models, the base model first.
pub(super) fn fabric(profile: &LinkProfile, scrape: &Scrape, models: &[ModelId], version: &str) -> Option<Arc<str>> {
    let spoken = connector_of(profile, scrape);
    if spoken == KvConnector::None {
        return None;
    }
    if let Some(fabric) = &profile.fabric {
        return Some(fabric.as_str().into());
    }
    let block = scrape.cache.capacity.block.0;
    let parts = [
        spoken.as_str(),
        version,
        scrape.cache.dtype.as_deref().unwrap_or_default(),
        &if block > 0 { block.to_string() } else { String::new() },
        models.first().map_or("", |model| &model.0),
    ];
    Some(parts.map(name_part).join(" ").into())
}

fn name_part(part: &str) -> &str {
    if part.is_empty() { "?" } else { &part[..part.floor_char_boundary(MAX_NAME_BYTES)] }
}

#[cfg(test)]
mod tests {
    use vocabulary::Tokens;

    use super::*;
    use crate::fleet::KvExchangeSetting;

    fn taught(seen: impl IntoIterator<Item = (u64, u64)>) -> KvLink {
        let start = LinkProfile { latency: Micros(2_000), bandwidth: 1e9, ..LinkProfile::default() };
        let mut estimate = LinkEstimate::new(&start);
        seen.into_iter().for_each(|(bytes, took)| estimate.observe(Bytes(bytes), Micros(took)));
        estimate.link("f".into(), KvLinkCapability::Prefixes)
    }

    #[test]
    fn large_transfers_teach_the_rate_and_small_ones_the_fixed_cost() {
        let truth = |bytes: u64| (bytes, 8_000 + bytes / 3_000);
        let link = taught((0..400).map(|turn| truth(if turn % 2 == 0 { 3_000_000_000 } else { 1_000 })));
        assert!((link.bytes_per_second / 3e9 - 1.0).abs() < 0.02, "{link:?}");
        assert!((7_900..=8_100).contains(&link.fixed.0), "{link:?}");
    }

    #[test]
    fn one_outlier_transfer_changes_little_and_an_empty_one_nothing() {
        let link = taught([(1 << 30, 600_000_000)]);
        assert!(link.bytes_per_second > 7e8, "{link:?}");
        assert_eq!(taught([(0, 5), (5, 0)]), taught([]));
        for seen in [(u64::MAX, 1), (1, u64::MAX), (u64::MAX, u64::MAX)] {
            let link = taught([seen; 500]);
            assert!(link.bytes_per_second.is_finite() && link.bytes_per_second >= 1.0, "{link:?}");
        }
    }

    fn of(transfers: KvExchangeSetting, scrape: &Scrape) -> Option<Arc<str>> {
        let profile = LinkProfile { transfers, ..LinkProfile::default() };
        fabric(&profile, scrape, &[ModelId::from("tiny")], "0.32.0")
    }

    fn page(block: u64, connector: Option<&'static str>) -> Scrape {
        let mut scrape = Scrape { connector, ..Scrape::default() };
        scrape.cache.capacity.block = Tokens(block);
        scrape.cache.dtype = Some("auto".into());
        scrape
    }

    #[test]
    fn auto_mode_needs_a_visible_connector() {
        let (with, without) = (page(32, Some("nixl")), page(32, None));
        assert_eq!(of(KvExchangeSetting::Auto, &with).as_deref(), Some("nixl 0.32.0 auto 32 tiny"));
        assert_eq!(of(KvExchangeSetting::Auto, &without), None);
        assert_eq!(of(KvExchangeSetting::On, &without), of(KvExchangeSetting::Auto, &with));
        assert_eq!(of(KvExchangeSetting::On, &Scrape::default()).as_deref(), Some("nixl 0.32.0 ? ? tiny"));
        assert_eq!(of(KvExchangeSetting::Off, &with), None);
    }

    #[test]
    fn block_size_model_and_version_separate_fabrics() {
        let profile = LinkProfile::default();
        let name =
            |block, model, version| fabric(&profile, &page(block, Some("nixl")), &[ModelId::from(model)], version);
        let mut all = vec![name(16, "a", "1"), name(32, "a", "1"), name(16, "b", "1"), name(16, "a", "2")];
        all.sort();
        all.dedup();
        assert_eq!(all.len(), 4, "{all:?}");
    }

    #[test]
    fn configured_fabric_is_used_verbatim_and_can_be_switched_off() {
        let mut profile = LinkProfile { fabric: Some("mine".into()), ..LinkProfile::default() };
        assert_eq!(fabric(&profile, &Scrape::default(), &[], "").as_deref(), Some("mine"));
        profile.transfers = KvExchangeSetting::Off;
        assert_eq!(fabric(&profile, &Scrape::default(), &[], ""), None);
    }

    #[test]
    fn long_fabric_names_are_cut_at_a_character_boundary() {
        let name = "ü".repeat(500);
        let profile = LinkProfile { transfers: KvExchangeSetting::On, ..LinkProfile::default() };
        let long = fabric(&profile, &Scrape::default(), &[ModelId::from(&*name)], &name).unwrap();
        assert!(long.len() <= 5 * (MAX_NAME_BYTES + 1), "{}", long.len());
    }
}
