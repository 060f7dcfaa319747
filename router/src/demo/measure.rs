//! Figures from samples: percentiles, the Prometheus text form, and how often an owner served. Pure.

use std::{collections::BTreeMap, time::Duration};

/// The `quantile` (0 to 1) of `values` by nearest rank, in milliseconds; 0 without values.
pub(crate) fn percentile_ms(values: &[Duration], quantile: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable();
    let rank = (quantile * sorted.len() as f64).ceil() as usize;
    let value = sorted.get(rank.saturating_sub(1)).copied().unwrap_or_default();
    (value.as_secs_f64() * 1e6).round() / 1e3
}

/// The mean of `values`, in milliseconds; 0 without values.
pub(crate) fn mean_ms(values: &[Duration]) -> f64 {
    let total: Duration = values.iter().sum();
    (total.as_secs_f64() * 1e6 / values.len().max(1) as f64).round() / 1e3
}

/// One scraped page in the Prometheus text form.
#[derive(Default, Clone, Debug)]
pub(crate) struct Page {
    samples: Vec<Sample>,
}

#[derive(Clone, Debug)]
struct Sample {
    name: String,
    labels: BTreeMap<String, String>,
    value: f64,
}

impl Page {
    /// Whether it tells nothing.
    pub(crate) fn is_empty(&self) -> bool {
        self.samples.is_empty()
    }

    /// Reads a page; lines that are no samples are left out.
    pub(crate) fn parse(text: &str) -> Page {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        Page { samples: lines.filter_map(sample).collect() }
    }

    /// The sum of all samples of `name` that carry every one of `labels`.
    pub(crate) fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let wanted = |sample: &&Sample| {
            let carries = |(key, value): &(&str, &str)| sample.labels.get(*key).is_some_and(|seen| seen == value);
            sample.name == name && labels.iter().all(carries)
        };
        // Empty sums are -0.0 otherwise.
        self.samples.iter().filter(wanted).map(|sample| sample.value).fold(0.0, |sum, value| sum + value)
    }

    /// The samples of `name`, summed by their `label`.
    pub(crate) fn by(&self, name: &str, label: &str) -> BTreeMap<String, f64> {
        let mut sums = BTreeMap::new();
        for sample in self.samples.iter().filter(|sample| sample.name == name) {
            if let Some(value) = sample.labels.get(label) {
                *sums.entry(value.clone()).or_default() += sample.value;
            }
        }
        sums
    }
}

fn sample(line: &str) -> Option<Sample> {
    let (series, rest) = match line.split_once('{') {
        Some((name, rest)) => {
            let end = closing_brace(rest)?;
            ((name, &rest[..end]), &rest[end + 1..])
        }
        None => {
            let (name, rest) = line.split_once(' ')?;
            ((name, ""), rest)
        }
    };
    let value = rest.split_whitespace().next()?.parse().ok()?;
    Some(Sample { name: series.0.trim().to_owned(), labels: labels(series.1)?, value })
}

/// The brace outside quotes.
fn closing_brace(text: &str) -> Option<usize> {
    let (mut quoted, mut escaped) = (false, false);
    text.char_indices().find_map(|(at, char)| {
        let ends = char == '}' && !quoted;
        quoted ^= char == '"' && !escaped;
        escaped = char == '\\' && !escaped;
        ends.then_some(at)
    })
}

fn labels(mut text: &str) -> Option<BTreeMap<String, String>> {
    let mut labels = BTreeMap::new();
    while !text.trim().is_empty() {
        let (key, rest) = text.split_once("=\"")?;
        let (value, rest) = quoted(rest)?;
        labels.insert(key.trim_start_matches(',').trim().to_owned(), value);
        text = rest;
    }
    Some(labels)
}

/// The text up to the closing quote with its escapes resolved, and what follows.
fn quoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut chars = text.char_indices();
    while let Some((at, char)) = chars.next() {
        match char {
            '"' => return Some((value, &text[at + 1..])),
            '\\' => match chars.next()?.1 {
                'n' => value.push('\n'),
                other => value.push(other),
            },
            _ => value.push(char),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_nearest_ranks() {
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
    fn samples_are_summed_over_what_is_not_asked_for() {
        let page = Page::parse(PAGE);
        let name = "vllm:prompt_tokens_by_source_total";
        assert_eq!(page.sum(name, &[("source", "local_compute")]), 1_120.0);
        assert_eq!(page.sum(name, &[("source", "local_compute"), ("model_name", "t")]), 120.0);
        assert_eq!(page.sum(name, &[]), 1_127.0);
        assert_eq!(page.sum("up", &[]), 1.0);
        assert_eq!(page.sum("absent", &[]), 0.0);
        assert_eq!(page.samples.len(), 4, "lines that are no samples are left out");
    }

    #[test]
    fn label_values_may_hold_quotes_braces_and_backslashes() {
        let by = Page::parse(PAGE).by("vllm:prompt_tokens_by_source_total", "model_name");
        assert_eq!(by.keys().map(String::as_str).collect::<Vec<_>>(), ["a\"}\\b", "t", "u"]);
        assert_eq!(by["a\"}\\b"], 7.0);
    }
}
