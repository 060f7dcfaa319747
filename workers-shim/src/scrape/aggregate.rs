//! Combines samples into the values of one worker, under old and new metric names.

use vocabulary::{Bytes, Incarnation, Tokens, WorkerCapacity};

use super::sample::Sample;
use super::{EngineKind, KvCacheLayout, PromptSources, Scrape, SleepState};

/// Largest plausible count. Timestamps of this century in microseconds are above 1e15.
const MAX_COUNT: f64 = 4e15;
/// Maximum number of ranks that are told apart.
const MAX_RANKS: usize = 256;
/// Maximum length of a precision's name.
const MAX_DTYPE_BYTES: usize = 32;

#[derive(Default)]
pub(super) struct ScrapeAggregator<'a> {
    engine: EngineKind,
    process: Option<Incarnation>,
    ranks: Vec<&'a str>,
    requests: RequestGauges,
    /// Sum and count.
    usage: (f64, u32),
    prompt: (f64, f64),
    prompts: PromptSources,
    memory: KvCapacityGauges<'a>,
    connector: Option<&'static str>,
    sleep_state: SleepState,
    expired_transfers: u64,
}

#[derive(Default)]
struct RequestGauges {
    running: f64,
    waiting: f64,
    /// The part of `waiting` that waits for KV from elsewhere, not for a place in the batch.
    pulling: f64,
}

/// Minima over all ranks; 0 if unknown.
#[derive(Default)]
struct KvCapacityGauges<'a> {
    /// Capacity reported in tokens; takes precedence over blocks x block size.
    tokens: u64,
    block: u64,
    blocks: u64,
    context: u64,
    bytes: u64,
    dtype: Option<&'a str>,
    /// Maxima over all ranks, from the reports in tokens and in blocks.
    max_blocks: (u64, u64),
}

impl<'a> ScrapeAggregator<'a> {
    pub(super) fn add(&mut self, sample: &Sample<'a>) {
        if let Some(name) = sample.name.strip_prefix("vllm:") {
            self.engine = EngineKind::Vllm;
            self.vllm(name, sample);
        } else if let Some(name) = sample.name.strip_prefix("sglang:") {
            self.engine = EngineKind::Sglang;
            // All tensor-, pipeline- and expert-parallel ranks of a replica report the same; only the first is read.
            if ["tp_rank", "pp_rank", "moe_ep_rank"].iter().all(|rank| sample.label(rank).is_none_or(|is| is == "0")) {
                self.sglang(name, sample);
            }
        } else if sample.name == "process_start_time_seconds" && sample.value > 0.0 {
            self.process = Some(Incarnation(count(sample.value * 1e6)));
        }
    }

    fn vllm(&mut self, name: &str, sample: &Sample<'a>) {
        let value = sample.value;
        match name {
            "num_requests_running" => self.running(value, sample.label("engine")),
            "num_requests_waiting" => self.requests.waiting += positive(value),
            "num_requests_waiting_by_reason" if sample.label("reason") == Some("deferred") => {
                self.requests.pulling += positive(value);
            }
            "kv_cache_usage_perc" | "gpu_cache_usage_perc" => self.usage(value),
            "cache_config_info" => self.memory.configured(sample),
            "request_prompt_tokens_sum" => self.prompt.0 += positive(value),
            "request_prompt_tokens_count" => self.prompt.1 += positive(value),
            "prompt_tokens_by_source_total" => {
                let tokens = Tokens(count(value));
                match sample.label("source") {
                    Some("local_compute") => self.prompts.computed += tokens,
                    Some("local_cache_hit") => self.prompts.cached += tokens,
                    Some("external_kv_transfer") => self.prompts.transferred += tokens,
                    _ => {}
                }
            }
            "engine_sleep_state" if sample.label("sleep_state") == Some("awake") && value == 0.0 => {
                self.sleep_state = SleepState::Asleep;
            }
            _ if name.starts_with("nixl_") => {
                self.connector = Some("nixl");
                if name == "nixl_num_kv_expired_reqs_total" {
                    self.expired_transfers = self.expired_transfers.saturating_add(count(value));
                }
            }
            _ => {}
        }
    }

    fn sglang(&mut self, name: &str, sample: &Sample<'a>) {
        let value = sample.value;
        if matches!(sample.label("engine_type"), Some("prefill" | "decode")) {
            self.connector = Some("sglang");
        }
        match name {
            "num_running_reqs" => self.running(value, sample.label("dp_rank")),
            "num_queue_reqs" => self.requests.waiting += positive(value),
            "token_usage" => self.usage(value),
            "max_total_num_tokens" => self.memory.tokens(count(value)),
            "page_size" => lower_to(&mut self.memory.block, count(value)),
            "num_pages" => self.memory.blocks(count(value)),
            "context_len" => lower_to(&mut self.memory.context, count(value)),
            "prompt_tokens_histogram_sum" => self.prompt.0 += positive(value),
            "prompt_tokens_histogram_count" => self.prompt.1 += positive(value),
            "prefill_effective_tokens_total" => match sample.label("mode") {
                Some("input") => self.prompts.computed += Tokens(count(value)),
                Some(hit) if hit.ends_with("_hit") => self.prompts.cached += Tokens(count(value)),
                _ => {}
            },
            _ => {}
        }
    }

    fn running(&mut self, value: f64, rank: Option<&'a str>) {
        self.requests.running += positive(value);
        if let Some(rank) = rank
            && self.ranks.len() < MAX_RANKS
            && !self.ranks.contains(&rank)
        {
            self.ranks.push(rank);
        }
    }

    fn usage(&mut self, value: f64) {
        if value.is_finite() {
            self.usage = (self.usage.0 + value.clamp(0.0, 1.0), self.usage.1 + 1);
        }
    }

    pub(super) fn total(self) -> Scrape {
        let RequestGauges { running, waiting, pulling } = self.requests;
        let pulling = pulling.min(waiting);
        Scrape {
            engine: self.engine,
            process: self.process,
            ranks: u16::try_from(self.ranks.len()).unwrap_or(u16::MAX).max(1),
            // `as` saturates, and the sums are not negative.
            running: (running + pulling) as u32,
            waiting: (waiting - pulling) as u32,
            kv_usage: self.usage.0 / f64::from(self.usage.1.max(1)),
            mean_prompt: (self.prompt.1 >= 1.0).then(|| Tokens(count(self.prompt.0 / self.prompt.1))),
            prompts: self.prompts,
            cache: self.memory.shape(),
            connector: self.connector,
            sleep_state: self.sleep_state,
            expired_transfers: self.expired_transfers,
        }
    }
}

impl<'a> KvCapacityGauges<'a> {
    fn tokens(&mut self, told: u64) {
        lower_to(&mut self.tokens, told);
        self.max_blocks.0 = self.max_blocks.0.max(told);
    }

    fn blocks(&mut self, told: u64) {
        lower_to(&mut self.blocks, told);
        self.max_blocks.1 = self.max_blocks.1.max(told);
    }

    /// Reads vLLM's `cache_config_info`, whose values are all labels.
    fn configured(&mut self, sample: &Sample<'a>) {
        let number = |name| sample.label(name).and_then(|text| text.parse::<u64>().ok()).unwrap_or(0);
        self.tokens(number("kv_cache_size_tokens"));
        lower_to(&mut self.block, number("block_size"));
        self.blocks(number("num_gpu_blocks"));
        // An overridden number of blocks need not fill the configured bytes.
        if number("num_gpu_blocks_override") == 0 {
            lower_to(&mut self.bytes, number("kv_cache_memory_bytes"));
        }
        self.dtype = sample.label("cache_dtype").filter(|name| name.len() <= MAX_DTYPE_BYTES);
    }

    fn shape(&self) -> KvCacheLayout {
        let tokens = if self.tokens > 0 { self.tokens } else { self.block.saturating_mul(self.blocks) };
        let each = self.bytes.checked_div(tokens).filter(|bytes| *bytes > 0);
        KvCacheLayout {
            capacity: WorkerCapacity { kv: Tokens(tokens), block: Tokens(self.block), context: Tokens(self.context) },
            max_blocks: self.max_blocks.1.max(self.max_blocks.0.checked_div(self.block).unwrap_or_default()),
            bytes_per_token: each.map(Bytes),
            dtype: self.dtype.map(Into::into),
        }
    }
}

fn positive(value: f64) -> f64 {
    if value.is_finite() { value.max(0.0) } else { 0.0 }
}

fn count(value: f64) -> u64 {
    positive(value).round().min(MAX_COUNT) as u64
}

/// Lowers `known` to `value`, if that is known and smaller.
fn lower_to(known: &mut u64, value: u64) {
    if value > 0 && (*known == 0 || value < *known) {
        *known = value;
    }
}
