//! Making metric families. Names, units and label sets are fixed here at start; a wrong one is a bug of ours.

use std::cell::RefCell;

use prometheus::core::Collector;
use prometheus::{
    Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts,
    Registry,
};

/// Registers families under the prefix `ownerserve_`, and remembers their names.
pub(super) struct Families<'a> {
    registry: &'a Registry,
    names: RefCell<Vec<String>>,
}

/// Seconds from 10 microseconds to 100: steps inside the router.
pub(super) const FINE_SECONDS: &[f64] = &[
    0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 10.0,
    100.0,
];

/// Seconds from 5 milliseconds to 10 minutes: what clients wait for.
pub(super) const SECONDS: &[f64] =
    &[0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0];

/// Tokens from a block to a million.
pub(super) const TOKENS: &[f64] = &[
    0.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 8192.0, 16384.0, 32768.0, 65536.0, 131072.0, 262144.0, 524288.0, 1048576.0,
];

const VALID: &str = "the name and labels of a metric are fixed and valid";

fn opts(name: &str, help: &str) -> Opts {
    Opts::new(format!("ownerserve_{name}"), help)
}

impl<'a> Families<'a> {
    pub(super) fn new(registry: &'a Registry) -> Self {
        Self { registry, names: RefCell::default() }
    }

    /// Of all families made so far.
    pub(super) fn names(&self) -> Vec<String> {
        self.names.borrow().clone()
    }

    fn register<C: Collector + Clone + 'static>(&self, family: C) -> C {
        self.names.borrow_mut().extend(family.desc().iter().map(|desc| desc.fq_name.clone()));
        self.registry.register(Box::new(family.clone())).expect("every metric is registered once");
        family
    }

    pub(super) fn counter(&self, name: &str, help: &str) -> IntCounter {
        self.register(IntCounter::with_opts(opts(name, help)).expect(VALID))
    }

    pub(super) fn counters(&self, name: &str, help: &str, labels: &[&str]) -> IntCounterVec {
        self.register(IntCounterVec::new(opts(name, help), labels).expect(VALID))
    }

    pub(super) fn gauge(&self, name: &str, help: &str) -> IntGauge {
        self.register(IntGauge::with_opts(opts(name, help)).expect(VALID))
    }

    pub(super) fn fraction(&self, name: &str, help: &str) -> Gauge {
        self.register(Gauge::with_opts(opts(name, help)).expect(VALID))
    }

    pub(super) fn gauges(&self, name: &str, help: &str, labels: &[&str]) -> IntGaugeVec {
        self.register(IntGaugeVec::new(opts(name, help), labels).expect(VALID))
    }

    pub(super) fn fractions(&self, name: &str, help: &str, labels: &[&str]) -> GaugeVec {
        self.register(GaugeVec::new(opts(name, help), labels).expect(VALID))
    }

    pub(super) fn histogram(&self, name: &str, help: &str, buckets: &[f64]) -> Histogram {
        let opts = HistogramOpts::from(opts(name, help)).buckets(buckets.to_vec());
        self.register(Histogram::with_opts(opts).expect(VALID))
    }

    pub(super) fn histograms(&self, name: &str, help: &str, (labels, buckets): (&[&str], &[f64])) -> HistogramVec {
        let opts = HistogramOpts::from(opts(name, help)).buckets(buckets.to_vec());
        self.register(HistogramVec::new(opts, labels).expect(VALID))
    }
}
