//! An engine's `/metrics`: the few families that routing needs, under vLLM's newer and older and SGLang's names.
//!
//! Pure. What is missing or broken in the text is left at "unknown"; it never fails.

use vocabulary::{Bytes, Capacity, Incarnation, Tokens};

/// Longest text that is read; what follows is ignored.
const MOST_BYTES: usize = 8 << 20;

/// Where prompt tokens came from, since the process started.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct PromptSources {
    /// Computed there.
    pub computed: f64,
    /// Found in its own cache.
    pub cached: f64,
    /// Fetched from another worker.
    pub transferred: f64,
}

/// How the KV cache is laid out.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct CacheShape {
    /// What fits.
    pub capacity: Capacity,
    /// KV of a token, where it can be told.
    pub bytes_per_token: Option<Bytes>,
    /// As configured (`auto`, `fp8`).
    pub dtype: Option<String>,
}

/// One look at an engine.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Scrape {
    /// Process identity; none where the engine does not tell.
    pub process: Option<Incarnation>,
    /// Data-parallel ranks that report.
    pub ranks: u16,
    /// Requests in the running batches.
    pub running: u32,
    /// Requests that wait.
    pub waiting: u32,
    /// KV blocks in use, 0 to 1; the mean over ranks.
    pub kv_usage: f64,
    /// Mean prompt of a request, all requests so far.
    pub mean_prompt: Option<Tokens>,
    /// Where prompts came from.
    pub prompts: PromptSources,
    /// Layout of the cache.
    pub cache: CacheShape,
    /// It can exchange KV by NIXL.
    pub nixl: bool,
    /// Transfers whose blocks nobody fetched in time.
    pub expired_transfers: f64,
}

/// Sums over ranks while reading.
#[derive(Default)]
struct Sums<'a> {
    engines: Vec<&'a str>,
    usage: (f64, u32),
    prompt: (f64, f64),
}

impl Scrape {
    /// Reads the Prometheus text format.
    pub fn read(text: &str) -> Self {
        let mut scrape = Self::default();
        let mut sums = Sums::default();
        let end = text.floor_char_boundary(MOST_BYTES.min(text.len()));
        for sample in text[..end].lines().filter_map(Sample::read) {
            scrape.sample(&sample, &mut sums);
        }
        scrape.ranks = u16::try_from(sums.engines.len()).unwrap_or(u16::MAX).max(1);
        if sums.usage.1 > 0 {
            scrape.kv_usage = (sums.usage.0 / f64::from(sums.usage.1)).clamp(0.0, 1.0);
        }
        if sums.prompt.1 >= 1.0 {
            scrape.mean_prompt = Some(Tokens((sums.prompt.0 / sums.prompt.1) as u64));
        }
        scrape
    }

    fn sample<'a>(&mut self, sample: &Sample<'a>, sums: &mut Sums<'a>) {
        let value = sample.value;
        self.nixl |= sample.name.starts_with("vllm:nixl_");
        match sample.name {
            "process_start_time_seconds" => self.process = Some(Incarnation((value * 1e6).round() as u64)),
            "vllm:num_requests_running" | "sglang:num_running_reqs" => {
                self.running = self.running.saturating_add(value as u32);
                if let Some(engine) = sample.label("engine").filter(|engine| !sums.engines.contains(engine)) {
                    sums.engines.push(engine);
                }
            }
            "vllm:num_requests_waiting" | "sglang:num_queue_reqs" => {
                self.waiting = self.waiting.saturating_add(value as u32);
            }
            "vllm:kv_cache_usage_perc" | "vllm:gpu_cache_usage_perc" | "sglang:token_usage" => {
                sums.usage = (sums.usage.0 + value, sums.usage.1 + 1);
            }
            "vllm:request_prompt_tokens_sum" => sums.prompt.0 += value,
            "vllm:request_prompt_tokens_count" => sums.prompt.1 += value,
            "vllm:prompt_tokens_by_source_total" => match sample.label("source") {
                Some("local_compute") => self.prompts.computed += value,
                Some("local_cache_hit") => self.prompts.cached += value,
                Some("external_kv_transfer") => self.prompts.transferred += value,
                _ => {}
            },
            "vllm:nixl_num_kv_expired_reqs_total" => self.expired_transfers += value,
            "vllm:cache_config_info" => self.cache.vllm(sample),
            "sglang:page_size" => self.cache.capacity.block = Tokens(value as u64),
            "sglang:max_total_num_tokens" => self.cache.capacity.kv = Tokens(value as u64),
            "sglang:context_len" => self.cache.capacity.context = Tokens(value as u64),
            _ => {}
        }
    }
}

impl CacheShape {
    fn vllm(&mut self, sample: &Sample<'_>) {
        let number = |label: &str| sample.label(label).and_then(|text| text.parse::<u64>().ok());
        let block = number("block_size").unwrap_or(0);
        let tokens = number("kv_cache_size_tokens").or(number("num_gpu_blocks").map(|n| n.saturating_mul(block)));
        // One sample a rank: ranks have caches of their own.
        self.capacity.kv += Tokens(tokens.unwrap_or(0));
        self.capacity.block = Tokens(block);
        if let (Some(bytes), Some(tokens @ 1..)) = (number("kv_cache_memory_bytes"), tokens) {
            self.bytes_per_token = Some(Bytes(bytes / tokens));
        }
        self.dtype = sample.label("cache_dtype").map(str::to_owned);
    }
}

/// One line: a name, labels, a value.
struct Sample<'a> {
    name: &'a str,
    labels: &'a str,
    value: f64,
}

impl<'a> Sample<'a> {
    fn read(line: &'a str) -> Option<Self> {
        if line.starts_with('#') {
            return None;
        }
        let (series, value) = match line.rfind('}') {
            Some(brace) => line.split_at(brace + 1),
            None => line.split_at(line.find(' ')?),
        };
        // A timestamp may follow the value.
        let value = value.split_ascii_whitespace().next()?.parse::<f64>().ok()?;
        let (name, labels) = match series.split_once('{') {
            Some((name, labels)) => (name, labels.strip_suffix('}')?),
            None => (series, ""),
        };
        // Engines report NaN for what they have not measured.
        value.is_finite().then_some(Self { name, labels, value })
    }

    /// The value of a label, without unescaping: none that matters here has escapes.
    fn label(&self, name: &str) -> Option<&'a str> {
        let mut rest = self.labels;
        while let Some((key, after)) = rest.split_once("=\"") {
            let end = closing_quote(after)?;
            if key.trim_start_matches([',', ' ']) == name {
                return Some(&after[..end]);
            }
            rest = &after[end + 1..];
        }
        None
    }
}

fn closing_quote(text: &str) -> Option<usize> {
    let mut escaped = false;
    text.bytes().position(|byte| {
        let closes = byte == b'"' && !escaped;
        escaped = byte == b'\\' && !escaped;
        closes
    })
}

#[cfg(test)]
mod tests;
