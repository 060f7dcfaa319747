//! Creates metric families. Names, units and label sets are fixed here at start; an invalid one is a bug of ours.

use std::cell::RefCell;

use prometheus::core::Collector;
use prometheus::{
    Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts,
    Registry, Result,
};

/// Registers families under the prefix `ownerserve_`, and records what they are.
#[derive(Debug)]
pub(super) struct FamilyRegistrar {
    pub(super) registry: Registry,
    pub(super) families: RefCell<Vec<FamilyDescription>>,
}

/// Definition of a metric family.
#[derive(Clone, Debug)]
pub struct FamilyDescription {
    /// Its name with the prefix; a histogram's without suffixes.
    pub name: String,
    /// Its type, as in the exposition format.
    pub kind: &'static str,
    /// Its labels, each with the values that have series from the start.
    pub labels: Vec<(String, Vec<String>)>,
    /// Its help text.
    pub help: String,
}

/// Histogram buckets in seconds, from 10 microseconds to 100 seconds: stages inside the router.
pub(super) const FINE_SECONDS: &[f64] = &[
    0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 10.0,
    100.0,
];

/// Histogram buckets in seconds, from 5 milliseconds to 10 minutes: what clients wait for.
pub(super) const SECONDS: &[f64] =
    &[0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0];

/// Histogram buckets in tokens, from a block to a million.
pub(super) const TOKENS: &[f64] = &[
    0.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 8192.0, 16384.0, 32768.0, 65536.0, 131072.0, 262144.0, 524288.0, 1048576.0,
];

/// A label with lists of its values that have series from the start; the others appear when they are first used.
pub(super) type LabelSpec<'a> = (&'a str, &'a [&'a [&'a str]]);

/// A kind of metric family.
pub(super) trait MetricFamily: Collector + Clone + 'static {
    /// Type, as in the exposition format.
    const KIND: &'static str;

    fn create(opts: HistogramOpts, labels: &[&str]) -> Result<Self>;
    /// Creates the series for these values.
    fn init_series(&self, values: &[&str]);
}

macro_rules! kinds {
    ($($kind:literal: $single:ident, $labelled:ident $(, $opts:ident)?;)+) => {$(
        impl MetricFamily for $single {
            const KIND: &'static str = $kind;

            fn create(opts: HistogramOpts, _: &[&str]) -> Result<Self> {
                Self::with_opts(opts$(.$opts)?)
            }

            fn init_series(&self, _: &[&str]) {}
        }

        impl MetricFamily for $labelled {
            const KIND: &'static str = $kind;

            fn create(opts: HistogramOpts, labels: &[&str]) -> Result<Self> {
                Self::new(opts$(.$opts)?, labels)
            }

            fn init_series(&self, values: &[&str]) {
                self.with_label_values(values);
            }
        }
    )+};
}

kinds! {
    "counter": IntCounter, IntCounterVec, common_opts;
    "gauge": IntGauge, IntGaugeVec, common_opts;
    "gauge": Gauge, GaugeVec, common_opts;
    "histogram": Histogram, HistogramVec;
}

impl FamilyRegistrar {
    /// Creates a family, with a series for each combination of its labels' values.
    pub(super) fn family<K: MetricFamily>(
        &self,
        (name, help): (&str, &str),
        labels: &[LabelSpec<'_>],
        buckets: &[&[f64]],
    ) -> K {
        let opts = HistogramOpts::from(Opts::new(format!("ownerserve_{name}"), help)).buckets(buckets.concat());
        let names: Vec<_> = labels.iter().map(|(label, _)| *label).collect();
        let family = K::create(opts, &names).expect("the name and labels of a metric are fixed and valid");
        let series = labels.iter().fold(vec![Vec::new()], |all, (_, values)| {
            let values = values.concat();
            all.iter().flat_map(|one| values.iter().map(|value| [&one[..], &[*value]].concat())).collect()
        });
        series.iter().for_each(|values| family.init_series(values));
        self.families.borrow_mut().extend(family.desc().iter().map(|desc| FamilyDescription {
            name: desc.fq_name.clone(),
            kind: K::KIND,
            labels: labels.iter().map(|(label, values)| ((*label).to_owned(), owned(&values.concat()))).collect(),
            help: desc.help.clone(),
        }));
        self.registry.register(Box::new(family.clone())).expect("every metric is registered once");
        family
    }
}

fn owned(values: &[&str]) -> Vec<String> {
    values.iter().map(|value| (*value).to_owned()).collect()
}

/// Returns the names of all variants, as values of a label.
pub(super) fn label_values<T: strum::VariantArray + AsRef<str>>() -> Vec<&'static str> {
    T::VARIANTS.iter().map(AsRef::as_ref).collect()
}

/// Defines a struct of families with one line per family:
/// `field: MetricFamily = "name" {label = [values], label} [buckets], "help";`. The values are those that have series
/// from the start. Structs of further families follow at the end.
macro_rules! families {
    ($(#[$doc:meta])* pub struct $of:ident {
        $($field:ident: $kind:ty = $name:literal
            $({$($label:ident $(= $values:expr)?),+})? $([$buckets:expr])?, $help:literal;)*
        $(+ $part:ident: $families:ty, $about:literal;)*
    }) => {
        $(#[$doc])*
        pub struct $of {
            $(#[doc = $help] pub $field: $kind,)*
            $(#[doc = $about] pub $part: $families,)*
        }

        impl $of {
            pub(super) fn register(families: &$crate::telemetry::families::FamilyRegistrar) -> Self {
                Self {
                    $($field: families.family(
                        ($name, $help),
                        &[$($((stringify!($label), &[$(&$values[..])?])),+)?],
                        &[$($buckets)?],
                    ),)*
                    $($part: <$families>::register(families),)*
                }
            }
        }
    };
}
pub(super) use families;
