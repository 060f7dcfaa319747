//! Figures from samples: percentiles, Prometheus text pages, and rates. Pure.

use std::collections::BTreeMap;
use std::time::Duration;

use workers_shim::scrape::Sample;

/// Returns the `quantile` (0 to 1) of `values` by nearest rank, in milliseconds; 0 without values.
pub(crate) fn percentile_ms(values: &[Duration], quantile: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable();
    let rank = (quantile * sorted.len() as f64).ceil() as usize;
    let value = sorted.get(rank.saturating_sub(1)).copied().unwrap_or_default();
    (value.as_secs_f64() * 1e6).round() / 1e3
}

/// Returns the mean of `values` in milliseconds; 0 without values.
pub(crate) fn mean_ms(values: &[Duration]) -> f64 {
    let total: Duration = values.iter().sum();
    (total.as_secs_f64() * 1e6 / values.len().max(1) as f64).round() / 1e3
}

/// Scraped page in the Prometheus text format; lines that are not samples are ignored.
#[derive(Default, Clone, Debug)]
pub(crate) struct MetricsScrape(String);

impl MetricsScrape {
    /// Returns whether the page has no samples.
    pub(crate) fn is_empty(&self) -> bool {
        self.samples().next().is_none()
    }

    pub(crate) fn parse(text: &str) -> MetricsScrape {
        MetricsScrape(text.to_owned())
    }

    fn samples(&self) -> impl Iterator<Item = Sample<'_>> {
        self.0.lines().filter(|line| !line.starts_with('#')).filter_map(Sample::read)
    }

    /// Sums all samples of `name` that have all of these labels.
    pub(crate) fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let carries = |sample: &Sample<'_>| labels.iter().all(|(key, value)| sample.label(key) == Some(*value));
        let matching = self.samples().filter(|sample| sample.name == name && carries(sample));
        // An empty float sum would be -0.0.
        matching.fold(0.0, |sum, sample| sum + sample.value)
    }

    /// Sums the samples of `name` by the value of `label`.
    pub(crate) fn by(&self, name: &str, label: &str) -> BTreeMap<String, f64> {
        let mut sums = BTreeMap::new();
        for sample in self.samples().filter(|sample| sample.name == name) {
            if let Some(value) = sample.label(label) {
                *sums.entry(value.to_owned()).or_default() += sample.value;
            }
        }
        sums
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_use_nearest_ranks() {
        let values: Vec<_> = (1..=100).rev().map(Duration::from_millis).collect();
        assert_eq!(percentile_ms(&values, 0.5), 50.0);
        assert_eq!(percentile_ms(&values, 0.99), 99.0);
        assert_eq!(percentile_ms(&values, 1.0), 100.0);
        assert_eq!(percentile_ms(&values[..1], 0.5), 100.0);
        assert_eq!(percentile_ms(&[], 0.5), 0.0);
        assert_eq!((mean_ms(&values), mean_ms(&values[..2]), mean_ms(&[])), (50.5, 99.5, 0.0));
    }

    const PAGE: &str = r#"
# HELP vllm:prompt_tokens_by_source_total Prompt tokens
# TYPE vllm:prompt_tokens_by_source_total counter
vllm:prompt_tokens_by_source_total{model_name="t",source="local_compute"} 120.0
vllm:prompt_tokens_by_source_total{model_name="u",source="local_compute"} 1e3 1700000000
vllm:prompt_tokens_by_source_total{source="external_kv_transfer",model_name="a\"}\\b"} 7
up 1
nonsense
half{a="b
"#;

    #[test]
    fn samples_are_summed_over_unspecified_labels() {
        let page = MetricsScrape::parse(PAGE);
        let name = "vllm:prompt_tokens_by_source_total";
        assert_eq!(page.sum(name, &[("source", "local_compute")]), 1_120.0);
        assert_eq!(page.sum(name, &[("source", "local_compute"), ("model_name", "t")]), 120.0);
        assert_eq!(page.sum(name, &[]), 1_127.0);
        assert_eq!(page.sum("up", &[]), 1.0);
        assert_eq!(page.sum("absent", &[]), 0.0);
        assert_eq!(page.samples().count(), 4, "lines that are no samples are left out");
    }

    #[test]
    fn label_values_may_contain_quotes_braces_and_backslashes() {
        let by = MetricsScrape::parse(PAGE).by("vllm:prompt_tokens_by_source_total", "model_name");
        assert_eq!(by.keys().map(String::as_str).collect::<Vec<_>>(), [r#"a\"}\\b"#, "t", "u"]);
        assert_eq!(by[r#"a\"}\\b"#], 7.0);
    }
}
