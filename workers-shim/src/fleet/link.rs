//! How KV comes to a worker: with whom it exchanges it, and what that costs. Pure.
//!
//! Two workers exchange KV when their fabrics are equal, so a fabric names all that must be equal at both ends:
//! connector, engine version, KV precision, block size and model. What is unknown is `?`.
//!
//! A transfer of n bytes takes `fixed + n / rate`. A transfer whose bytes are believed to take longer than `fixed`
//! teaches the rate, `n / (time - fixed)`, a smaller one teaches `fixed`, `time - n / rate`; averaged as speeds are.

use std::sync::Arc;

use vocabulary::{Bytes, Carries, Link, Micros, ModelId};

use super::config::LinkProfile;
use super::estimate::{Confidence, Estimate};
use super::speech::spoken;
use crate::dialect::Spoken;
use crate::scrape::Scrape;

/// Longest part of a fabric's name that counts; longer ones are cut.
const MOST: usize = 64;
/// Believed of nothing: faster than any link.
const FASTEST: f64 = 1e15;

/// Cost of transfers to one worker as it is believed now.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct LinkEstimate {
    fixed: Estimate,
    rate: Estimate,
}

impl LinkEstimate {
    pub(super) fn new(start: &LinkProfile) -> Self {
        Self {
            fixed: Estimate::new(start.fixed_us as f64, f64::MAX),
            rate: Estimate::new(start.bytes_per_second, FASTEST),
        }
    }

    /// Learns from a transfer.
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

    /// How sure the fixed cost and the rate are.
    pub(super) fn confidence(&self) -> (Confidence, Confidence) {
        (self.fixed.confidence(), self.rate.confidence())
    }

    /// As a link of `fabric`.
    pub(super) fn link(&self, fabric: Arc<str>, carries: Carries) -> Link {
        let fixed = Micros(self.fixed.value().round() as u64);
        Link { fabric, fixed, bytes_per_second: self.rate.value(), carries }
    }
}

/// The fabric that a worker belongs to, if it exchanges KV at all. `models`: what it serves, the base model first.
pub(super) fn fabric(profile: &LinkProfile, scrape: &Scrape, models: &[ModelId], version: &str) -> Option<Arc<str>> {
    let spoken = spoken(profile, scrape);
    if spoken == Spoken::Plain {
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
    Some(parts.map(named).join(" ").into())
}

fn named(part: &str) -> &str {
    if part.is_empty() { "?" } else { &part[..part.floor_char_boundary(MOST)] }
}

#[cfg(test)]
mod tests {
    use vocabulary::Tokens;

    use super::*;
    use crate::fleet::Transfers;

    fn taught(seen: impl IntoIterator<Item = (u64, u64)>) -> Link {
        let start = LinkProfile { fixed_us: 2_000, bytes_per_second: 1e9, ..LinkProfile::default() };
        let mut estimate = LinkEstimate::new(&start);
        seen.into_iter().for_each(|(bytes, took)| estimate.observe(Bytes(bytes), Micros(took)));
        estimate.link("f".into(), Carries::Prefixes)
    }

    #[test]
    fn large_transfers_teach_the_rate_and_small_ones_the_fixed_cost() {
        let truth = |bytes: u64| (bytes, 8_000 + bytes / 3_000);
        let link = taught((0..400).map(|turn| truth(if turn % 2 == 0 { 3_000_000_000 } else { 1_000 })));
        assert!((link.bytes_per_second / 3e9 - 1.0).abs() < 0.02, "{link:?}");
        assert!((7_900..=8_100).contains(&link.fixed.0), "{link:?}");
    }

    #[test]
    fn one_stuck_transfer_changes_little_and_an_empty_one_nothing() {
        let link = taught([(1 << 30, 600_000_000)]);
        assert!(link.bytes_per_second > 7e8, "{link:?}");
        assert_eq!(taught([(0, 5), (5, 0)]), taught([]));
        for seen in [(u64::MAX, 1), (1, u64::MAX), (u64::MAX, u64::MAX)] {
            let link = taught([seen; 500]);
            assert!(link.bytes_per_second.is_finite() && link.bytes_per_second >= 1.0, "{link:?}");
        }
    }

    fn of(transfers: Transfers, scrape: &Scrape) -> Option<Arc<str>> {
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
    fn by_themselves_only_workers_that_show_a_connector_exchange() {
        let (with, without) = (page(32, Some("nixl")), page(32, None));
        assert_eq!(of(Transfers::Auto, &with).as_deref(), Some("nixl 0.32.0 auto 32 tiny"));
        assert_eq!(of(Transfers::Auto, &without), None);
        assert_eq!(of(Transfers::On, &without), of(Transfers::Auto, &with));
        assert_eq!(of(Transfers::On, &Scrape::default()).as_deref(), Some("nixl 0.32.0 ? ? tiny"));
        assert_eq!(of(Transfers::Off, &with), None);
    }

    #[test]
    fn other_block_sizes_models_and_versions_are_other_fabrics() {
        let profile = LinkProfile::default();
        let name =
            |block, model, version| fabric(&profile, &page(block, Some("nixl")), &[ModelId::from(model)], version);
        let mut all = vec![name(16, "a", "1"), name(32, "a", "1"), name(16, "b", "1"), name(16, "a", "2")];
        all.sort();
        all.dedup();
        assert_eq!(all.len(), 4, "{all:?}");
    }

    #[test]
    fn a_configured_fabric_is_taken_as_it_is_and_switched_off_like_any() {
        let mut profile = LinkProfile { fabric: Some("mine".into()), ..LinkProfile::default() };
        assert_eq!(fabric(&profile, &Scrape::default(), &[], "").as_deref(), Some("mine"));
        profile.transfers = Transfers::Off;
        assert_eq!(fabric(&profile, &Scrape::default(), &[], ""), None);
    }

    #[test]
    fn endless_names_are_cut_at_a_character() {
        let name = "ü".repeat(500);
        let profile = LinkProfile { transfers: Transfers::On, ..LinkProfile::default() };
        let long = fabric(&profile, &Scrape::default(), &[ModelId::from(&*name)], &name).unwrap();
        assert!(long.len() <= 5 * (MOST + 1), "{}", long.len());
    }
}
