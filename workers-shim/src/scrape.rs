//! An engine's `/metrics` page, read for the few numbers that a router needs. It never panics and never fails: a line
//! that cannot be read is skipped, a number that makes no sense is left out.
//!
//! Format: Prometheus text exposition 0.0.4. Names: vLLM 0.6 to 0.32, SGLang 0.5. A page with several series of one
//! name (data-parallel ranks) is read as one worker: requests add up, usage is averaged, capacity is the smallest.

mod aggregate;
mod sample;

use std::sync::Arc;

use vocabulary::{Bytes, Incarnation, Tokens, WorkerCapacity};

use aggregate::ScrapeAggregator;
pub use sample::Sample;

/// Longest page that is read; what lies behind is ignored. vLLM's are 50 KB, SGLang's 85 KB.
pub const MAX_BYTES: usize = 4 << 20;

/// Whose metrics they are.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum EngineKind {
    /// Neither of the following.
    #[default]
    Other,
    /// `vllm:...`
    Vllm,
    /// `sglang:...`
    Sglang,
}

/// Whether the engine holds its weights and KV.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum SleepState {
    /// It works, or says nothing of sleeping.
    #[default]
    Awake,
    /// It was put to sleep: it answers probes and serves nobody.
    Asleep,
}

/// Where prompt tokens came from, since the process started.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PromptSources {
    /// Computed there.
    pub computed: Tokens,
    /// Found in its own cache.
    pub cached: Tokens,
    /// Fetched from another worker or a store.
    pub transferred: Tokens,
}

/// How the KV cache is laid out.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct KvCacheLayout {
    /// What fits, in the smallest rank.
    pub capacity: WorkerCapacity,
    /// Blocks that fit into the largest rank: no rank holds more. 0 is unknown.
    pub max_blocks: u64,
    /// KV of a token, where it can be told.
    pub bytes_per_token: Option<Bytes>,
    /// Precision as configured (`auto`, `fp8`).
    pub dtype: Option<Arc<str>>,
}

/// What one page says.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Scrape {
    /// Whose page it is.
    pub engine: EngineKind,
    /// Process identity; none where the page does not tell (SGLang, several API server processes).
    pub process: Option<Incarnation>,
    /// Data-parallel ranks that report, at least 1.
    pub ranks: u16,
    /// Requests in the batch, with those that hold memory and wait for KV from elsewhere.
    pub running: u32,
    /// Requests that wait for a place in it.
    pub waiting: u32,
    /// KV blocks in use, 0 to 1.
    pub kv_usage: f64,
    /// Mean prompt of a request, all requests so far.
    pub mean_prompt: Option<Tokens>,
    /// Where prompts came from.
    pub prompts: PromptSources,
    /// Layout of the cache.
    pub cache: KvCacheLayout,
    /// How it hands KV over where metrics show it: `nixl`, or `sglang` at its prefill and decode workers.
    pub connector: Option<&'static str>,
    /// Whether it sleeps.
    pub sleep_state: SleepState,
    /// Transfers whose blocks nobody fetched in time.
    pub expired_transfers: u64,
}

impl Scrape {
    /// Reads a page.
    pub fn read(page: &str) -> Self {
        let mut tally = ScrapeAggregator::default();
        let lines = truncate_to_lines(page).lines().map(str::trim_ascii).filter(|line| !line.starts_with('#'));
        for sample in lines.filter_map(Sample::read) {
            tally.add(&sample);
        }
        tally.total()
    }

    /// What a prompt has to compute on average: the mean prompt x the share of prompt tokens that was computed there.
    pub fn mean_prefill_tokens(&self) -> Option<Tokens> {
        let PromptSources { computed, cached, transferred } = self.prompts;
        let all = computed + cached + transferred;
        let share = if all == Tokens::ZERO { 1.0 } else { computed.0 as f64 / all.0 as f64 };
        self.mean_prompt.map(|mean| Tokens((mean.0 as f64 * share) as u64))
    }
}

/// The whole lines within the limit.
fn truncate_to_lines(page: &str) -> &str {
    if page.len() <= MAX_BYTES {
        return page;
    }
    let end = page.as_bytes()[..MAX_BYTES].iter().rposition(|byte| *byte == b'\n').unwrap_or(0);
    // A newline is a character of its own, so this is a boundary.
    page.get(..end).unwrap_or_default()
}

#[cfg(test)]
mod tests;
