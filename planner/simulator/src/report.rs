//! The figures of runs, and how they are written: a table for people, JSON and CSV for programs.

use std::collections::BTreeMap;

use serde::Serialize;

/// What one run came to. Times are seconds of virtual time; those of steps stop being counted when fewer sessions run
/// than were asked for.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct Figures {
    /// Who decided.
    pub policy: &'static str,
    /// What it was given.
    pub traffic: Traffic,
    /// Steps that were served.
    pub steps: usize,
    /// Steps that were not when nothing happened any more.
    pub unserved: usize,
    /// From a step's arrival to its first token.
    pub first_token: Times,
    /// The same, of steps that add at most 1,024 tokens to what their session had.
    pub small_first_token: Times,
    /// From a step's arrival to the end of its answer.
    pub step: Times,
    /// The sum of its steps' times, of each session.
    pub session: Times,
    /// Between two tokens of an answer: its time after the first token by its tokens.
    pub token: Times,
    /// What was computed and what was not.
    pub reuse: Reuse,
    /// Where KV lay and moved.
    pub memory: Memory,
    /// What the workers did.
    pub service: Service,
}

/// Which traffic, and which chance.
#[derive(Clone, Copy, PartialEq, Serialize, Debug)]
pub struct Traffic {
    /// Sessions at once, or the factor on the recorded rate.
    pub load: f64,
    /// What chance was drawn from.
    pub seed: u64,
}

/// A distribution of times, in seconds.
#[derive(Clone, Copy, PartialEq, Serialize, Debug, Default)]
pub struct Times {
    /// The mean.
    pub mean: f64,
    /// Half are shorter.
    pub p50: f64,
    /// 95 of a hundred are.
    pub p95: f64,
    /// 99 of a hundred are.
    pub p99: f64,
}

impl Times {
    /// Of times in any order; zeros without any.
    pub fn of(mut times: Vec<f64>) -> Self {
        if times.is_empty() {
            return Self::default();
        }
        // Summed as they came, so that equal runs have equal means to the bit.
        let mean = times.iter().sum::<f64>() / times.len() as f64;
        times.sort_by(f64::total_cmp);
        let at = |share: f64| times[((share * times.len() as f64) as usize).min(times.len() - 1)];
        Self { mean, p50: at(0.5), p95: at(0.95), p99: at(0.99) }
    }
}

/// What was computed and what was not.
#[derive(Clone, Copy, PartialEq, Serialize, Debug)]
pub struct Reuse {
    /// Prompt tokens that were computed.
    pub prefill_tokens: u64,
    /// Prompt tokens that were not.
    pub saved_tokens: u64,
    /// Share of prompt tokens found in the memory of the worker that computed the rest.
    pub hit_rate: f64,
    /// Share of steps that go on from others and found at least 95 % of what anybody held of them when they were placed.
    pub owner_hit_rate: f64,
    /// Share of prompt tokens that were sent by another worker before the prompt began.
    pub fetched_rate: f64,
    /// Prompt tokens that came back from the host tier.
    pub restored_tokens: u64,
}

/// Where KV lay and moved.
#[derive(Clone, Copy, PartialEq, Serialize, Debug)]
pub struct Memory {
    /// Cached tokens of all workers by the distinct ones among them, looked at every 400 steps.
    pub duplicate_factor: f64,
    /// Bytes of KV that went over links.
    pub kv_bytes_moved: u64,
    /// Tokens that lost their place in device memory.
    pub evicted_tokens: u64,
    /// Sessions at once times their mean prompt, by the memory of all workers; 0 where requests come at recorded times.
    pub occupancy: f64,
}

/// What the workers did.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct Service {
    /// Until the last answer was whole.
    pub seconds: f64,
    /// Sessions that came to their end.
    pub sessions_over: usize,
    /// By the hours of all workers' GPUs.
    pub sessions_per_gpu_hour: f64,
    /// Share of the time of answers in which they waited for a prompt's chunk beside them.
    pub decode_stall: f64,
    /// Share of the workers' time in which they computed prompts.
    pub prefill_use: f64,
    /// Steps that the policy had no plan of its own for; they went where the fewest requests were.
    pub unplanned: usize,
    /// How often each way of serving was taken.
    pub actions: BTreeMap<&'static str, usize>,
}

/// A column: who sees it, its name, and its value with as many digits as it deserves.
type Column = (Seen, &'static str, fn(&Figures) -> String);

/// Whether a column is worth a person's width.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Seen {
    InTable,
    InFull,
}

use Seen::{InFull, InTable};

const COLUMNS: [Column; 26] = [
    (InTable, "policy", |f| f.policy.to_owned()),
    (InTable, "load", |f| format!("{}", f.traffic.load)),
    (InFull, "seed", |f| f.traffic.seed.to_string()),
    (InFull, "steps", |f| f.steps.to_string()),
    (InFull, "unserved", |f| f.unserved.to_string()),
    (InTable, "ttft_mean_s", |f| format!("{:.3}", f.first_token.mean)),
    (InTable, "ttft_p95_s", |f| format!("{:.3}", f.first_token.p95)),
    (InTable, "ttft_p99_s", |f| format!("{:.3}", f.first_token.p99)),
    (InFull, "small_p95_s", |f| format!("{:.3}", f.small_first_token.p95)),
    (InTable, "small_p99_s", |f| format!("{:.3}", f.small_first_token.p99)),
    (InTable, "step_mean_s", |f| format!("{:.3}", f.step.mean)),
    (InFull, "step_p95_s", |f| format!("{:.3}", f.step.p95)),
    (InTable, "session_mean_s", |f| format!("{:.1}", f.session.mean)),
    (InTable, "prefill_mtok", |f| format!("{:.2}", f.reuse.prefill_tokens as f64 / 1e6)),
    (InTable, "hit", |f| format!("{:.4}", f.reuse.hit_rate)),
    (InTable, "owner_hit", |f| format!("{:.4}", f.reuse.owner_hit_rate)),
    (InFull, "fetched", |f| format!("{:.4}", f.reuse.fetched_rate)),
    (InTable, "duplicates", |f| format!("{:.3}", f.memory.duplicate_factor)),
    (InTable, "moved_gb", |f| format!("{:.1}", f.memory.kv_bytes_moved as f64 / 1e9)),
    (InFull, "tpot_mean_ms", |f| format!("{:.2}", f.token.mean * 1e3)),
    (InTable, "tpot_p99_ms", |f| format!("{:.2}", f.token.p99 * 1e3)),
    (InTable, "stall", |f| format!("{:.4}", f.service.decode_stall)),
    (InFull, "prefill_use", |f| format!("{:.4}", f.service.prefill_use)),
    (InTable, "unplanned", |f| f.service.unplanned.to_string()),
    (InFull, "sessions_per_gpu_hour", |f| format!("{:.3}", f.service.sessions_per_gpu_hour)),
    (InFull, "occupancy", |f| format!("{:.3}", f.memory.occupancy)),
];

/// One row a run with what people look at first, below the columns' names.
pub fn table(runs: &[Figures]) -> Vec<Vec<String>> {
    rows(runs, |seen| seen == InTable)
}

/// Every run as comma-separated values, below the columns' names.
pub fn csv(runs: &[Figures]) -> String {
    rows(runs, |_| true).into_iter().map(|row| row.join(",") + "\n").collect()
}

fn rows(runs: &[Figures], shown: impl Fn(Seen) -> bool) -> Vec<Vec<String>> {
    let columns = || COLUMNS.iter().filter(|(seen, ..)| shown(*seen));
    let names = columns().map(|(_, name, _)| (*name).to_owned()).collect();
    let row = |figures: &Figures| columns().map(|(.., value)| value(figures)).collect();
    std::iter::once(names).chain(runs.iter().map(row)).collect()
}
