//! Parses an engine's `/metrics` page for the few values that routing needs. It never panics and never fails:
//! unreadable lines are skipped, implausible values ignored.
//!
//! Format: Prometheus text exposition 0.0.4. Names: vLLM 0.6 to 0.32, SGLang 0.5. Several series of one name
//! (data-parallel ranks) are combined into one worker: requests are summed, usage is averaged, capacity is the minimum.

mod aggregate;
mod sample;

use std::sync::Arc;

use vocabulary::{Bytes, Incarnation, Tokens, WorkerCapacity};

use aggregate::ScrapeAggregator;
pub use sample::Sample;

/// Maximum size of a page; the rest is ignored. vLLM's have 50 KB, SGLang's 85 KB.
pub const MAX_BYTES: usize = 4 << 20;

/// The engine that metrics belong to.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum EngineKind {
    /// Another engine, or unknown.
    #[default]
    Other,
    /// `vllm:...`
    Vllm,
    /// `sglang:...`
    Sglang,
}

/// Whether the engine has its weights and KV loaded.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum SleepState {
    /// It serves, or reports no sleep state.
    #[default]
    Awake,
    /// It was put to sleep: it answers probes but serves no requests.
    Asleep,
}

/// Origin of prompt tokens since the process started.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PromptSources {
    /// Computed by the engine.
    pub computed: Tokens,
    /// Found in its own cache.
    pub cached: Tokens,
    /// Fetched from another worker or a store.
    pub transferred: Tokens,
}

/// Layout of the KV cache.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct KvCacheLayout {
    /// Capacity of the smallest rank.
    pub capacity: WorkerCapacity,
    /// Blocks that fit into the largest rank, so no rank holds more. 0 if unknown.
    pub max_blocks: u64,
    /// KV bytes per token, if known.
    pub bytes_per_token: Option<Bytes>,
    /// KV precision as configured (`auto`, `fp8`).
    pub dtype: Option<Arc<str>>,
}

/// The values of one page.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Scrape {
    /// The engine.
    pub engine: EngineKind,
    /// Process identity; None if the page does not contain it (SGLang, several API server processes).
    pub process: Option<Incarnation>,
    /// Number of reporting data-parallel ranks, at least 1.
    pub ranks: u16,
    /// Running requests, including those that hold memory while they wait for KV from elsewhere.
    pub running: u32,
    /// Waiting requests.
    pub waiting: u32,
    /// Fraction of KV blocks in use, 0 to 1.
    pub kv_usage: f64,
    /// Mean prompt length over all requests so far.
    pub mean_prompt: Option<Tokens>,
    /// Origin of prompt tokens.
    pub prompts: PromptSources,
    /// Layout of the KV cache.
    pub cache: KvCacheLayout,
    /// The KV connector, if metrics show it: `nixl`, or `sglang` at its prefill and decode workers.
    pub connector: Option<&'static str>,
    /// Whether the engine sleeps.
    pub sleep_state: SleepState,
    /// Transfers whose blocks were not fetched in time.
    pub expired_transfers: u64,
}

impl Scrape {
    /// Parses a page.
    pub fn read(page: &str) -> Self {
        let mut tally = ScrapeAggregator::default();
        let lines = truncate_to_lines(page).lines().map(str::trim_ascii).filter(|line| !line.starts_with('#'));
        for sample in lines.filter_map(Sample::read) {
            tally.add(&sample);
        }
        tally.total()
    }

    /// Returns the mean number of computed tokens per prompt: the mean prompt length x the share of prompt tokens that
    /// was computed.
    pub fn mean_prefill_tokens(&self) -> Option<Tokens> {
        let PromptSources { computed, cached, transferred } = self.prompts;
        let all = computed + cached + transferred;
        let share = if all == Tokens::ZERO { 1.0 } else { computed.0 as f64 / all.0 as f64 };
        self.mean_prompt.map(|mean| Tokens((mean.0 as f64 * share) as u64))
    }
}

/// Returns the complete lines within the size limit.
fn truncate_to_lines(page: &str) -> &str {
    if page.len() <= MAX_BYTES {
        return page;
    }
    let end = page.as_bytes()[..MAX_BYTES].iter().rposition(|byte| *byte == b'\n').unwrap_or(0);
    // A newline is one byte in UTF-8, so this is a character boundary.
    page.get(..end).unwrap_or_default()
}

#[cfg(test)]
mod tests;
