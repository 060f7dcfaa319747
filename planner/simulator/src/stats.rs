//! Statistics of a trace, independent of any policy: lengths, pauses, the best possible reuse, and forks.

mod conversations;
mod tree;

use std::collections::{BTreeMap, HashSet};

use engine_model::runs::RunId;
use planner::{ClassificationInputs, ClassificationThresholds, HeadRelation, StepKind, classify};
use serde::Serialize;
use vocabulary::{Micros, Tokens};

use crate::report::percentile;
use crate::trace::{ArrivalProcess, Trace, TraceStep};
use conversations::{ConversationStep, ConversationTracker};
use tree::VisitCounts;
pub use tree::{ForkStats, RepeatedPrefixCriteria, RepeatedPrefixStats};

/// Statistics of one trace. Ratios are 0 to 1, lengths in tokens, times in seconds.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct TraceStats {
    /// Number of requests.
    pub requests: usize,
    /// Number of sessions; for requests at recorded times, number of chains. A request continues the latest earlier one
    /// whose whole prompt, of at least 1,024 tokens, it starts with; it starts a new chain if that one was continued
    /// before.
    pub conversations: usize,
    /// Steps per conversation.
    pub steps: Percentiles,
    /// Number of sessions with sub-agents.
    pub with_sub_agents: usize,
    /// Lengths of prompts and answers.
    pub lengths: LengthStats,
    /// Pauses between the steps of a conversation.
    pub gaps: TurnGapStats,
    /// Hit rates of an unlimited cache.
    pub ideal_hits: IdealCacheStats,
    /// Forks of the prompts.
    pub forks: ForkStats,
    /// Share of requests by kind of step, as the planner classifies them from what their own conversation had before.
    pub kinds: BTreeMap<&'static str, f64>,
    /// Repeated prefixes in the traffic.
    pub repetition: RepeatedPrefixStats,
    /// Notes on what was left out, and other caveats.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// Percentiles of a distribution.
#[derive(Clone, Copy, PartialEq, Serialize, Debug, Default)]
pub struct Percentiles {
    /// Median.
    pub p50: f64,
    /// 90th percentile.
    pub p90: f64,
    /// 99th percentile.
    pub p99: f64,
    /// Maximum.
    pub max: f64,
    /// The mean.
    pub mean: f64,
}

impl Percentiles {
    /// Returns the percentiles of values in any order; zeros without values.
    pub fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let Some(last) = values.len().checked_sub(1) else { return Self::default() };
        let at = |share: f64| percentile(&values, share);
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        Self { p50: at(0.5), p90: at(0.9), p99: at(0.99), max: values[last], mean }
    }
}

/// Lengths of prompts and answers, in tokens.
#[derive(Clone, Copy, PartialEq, Serialize, Debug)]
pub struct LengthStats {
    /// Whole prompts.
    pub prompt: Percentiles,
    /// Answers.
    pub answer: Percentiles,
    /// Tokens of a prompt that its conversation did not have before.
    pub new: Percentiles,
}

/// Seconds from the end of a step (or its start, for recorded times) to the start of the next one.
#[derive(Clone, Copy, PartialEq, Serialize, Debug)]
pub struct TurnGapStats {
    /// All pauses.
    pub seconds: Percentiles,
    /// Share of pauses over one minute.
    pub over_60_s: f64,
    /// Share of pauses over five minutes.
    pub over_300_s: f64,
}

/// Shares of all prompt tokens that an unlimited cache would hit.
#[derive(Clone, Copy, PartialEq, Serialize, Debug)]
pub struct IdealCacheStats {
    /// One cache for all requests.
    pub everywhere: f64,
    /// One cache for all requests that also keeps answers.
    pub with_answers: f64,
    /// One cache per conversation.
    pub within_conversations: f64,
    /// Tokens of all prompts.
    pub prompt_tokens: u64,
    /// Tokens of the distinct runs in all prompts.
    pub distinct_tokens: u64,
}

/// Collects the statistics of a trace step by step.
struct TraceStatsCollector<'a> {
    trace: &'a Trace,
    seen_runs: Vec<bool>,
    answered_runs: Vec<bool>,
    seen_by_conversation: HashSet<(usize, RunId)>,
    visits: VisitCounts,
    kinds: BTreeMap<&'static str, usize>,
    hits: [u64; 3],
    new: Vec<f64>,
}

impl TraceStats {
    /// Computes the statistics of `trace`.
    pub fn of(trace: &Trace, repetition: RepeatedPrefixCriteria) -> Self {
        let mut reading = TraceStatsCollector {
            trace,
            seen_runs: vec![false; trace.runs.len()],
            answered_runs: vec![false; trace.runs.len()],
            seen_by_conversation: HashSet::new(),
            visits: VisitCounts::new(trace.runs.len()),
            kinds: StepKind::ALL.map(|kind| (kind.as_str(), 0)).into(),
            hits: [0; 3],
            new: Vec::new(),
        };
        let mut conversations = ConversationTracker::default();
        for session in &trace.sessions {
            conversations.next_session();
            for step in &session.steps {
                let place = conversations.place(trace, step);
                reading.read(step, &place);
            }
        }
        reading.stats(&conversations, repetition)
    }
}

impl TraceStatsCollector<'_> {
    fn read(&mut self, step: &TraceStep, position: &ConversationStep) {
        let runs = &self.trace.runs;
        let found = |has: &dyn Fn(&RunId) -> bool| {
            let known = step.path.iter().take_while(|run| has(run)).count();
            runs.end_depth(&step.path[..known])
        };
        let own = found(&|run| self.seen_by_conversation.contains(&(position.conversation, *run)));
        let all = found(&|run| self.seen_runs[run.0 as usize]);
        let answers = found(&|run| self.seen_runs[run.0 as usize] || self.answered_runs[run.0 as usize]);
        let forked = self
            .visits
            .visit(runs, &step.path, |run| self.seen_by_conversation.contains(&(position.conversation, run)));
        let forked = if self.trace.arrivals == ArrivalProcess::Recorded { position.forked } else { forked };
        for run in step.path.iter() {
            self.seen_runs[run.0 as usize] = true;
            self.seen_by_conversation.insert((position.conversation, *run));
        }
        step.resent_path.iter().flat_map(|path| path.iter()).for_each(|run| self.answered_runs[run.0 as usize] = true);
        for (sum, tokens) in self.hits.iter_mut().zip([all, answers, own]) {
            *sum += tokens.0;
        }
        self.new.push((step.prompt - own).0 as f64);
        *self.kinds.entry(kind(step, position, (own, forked)).as_str()).or_default() += 1;
    }

    fn stats(self, conversations: &ConversationTracker, repetition: RepeatedPrefixCriteria) -> TraceStats {
        let (trace, requests) = (self.trace, self.trace.steps().count());
        let tokens =
            |of: &dyn Fn(&TraceStep) -> Tokens| Percentiles::of(trace.steps().map(|step| of(step).0 as f64).collect());
        let prompt_tokens: u64 = trace.steps().map(|step| step.prompt.0).sum();
        let share = |part: u64, whole: u64| part as f64 / whole.max(1) as f64;
        let gaps = &conversations.gaps;
        let over = |seconds: f64| share(gaps.iter().filter(|gap| **gap > seconds).count() as u64, gaps.len() as u64);
        let distinct = self.seen_runs.iter().zip(0..).filter(|(seen, _)| **seen);
        let kinds = self.kinds.iter().map(|(kind, count)| (*kind, share(*count as u64, requests as u64)));
        let spawned = |steps: &[TraceStep]| steps.iter().any(|step| step.agent > 0);
        TraceStats {
            requests,
            conversations: conversations.steps.len(),
            steps: Percentiles::of(conversations.steps.clone()),
            with_sub_agents: trace.sessions.iter().filter(|session| spawned(&session.steps)).count(),
            lengths: LengthStats {
                prompt: tokens(&|step| step.prompt),
                answer: tokens(&|step| step.answer),
                new: Percentiles::of(self.new),
            },
            gaps: TurnGapStats {
                over_60_s: over(60.0),
                over_300_s: over(300.0),
                seconds: Percentiles::of(gaps.to_vec()),
            },
            ideal_hits: IdealCacheStats {
                everywhere: share(self.hits[0], prompt_tokens),
                with_answers: share(self.hits[1], prompt_tokens),
                within_conversations: share(self.hits[2], prompt_tokens),
                prompt_tokens,
                distinct_tokens: distinct.map(|(_, run)| trace.runs.tokens(RunId(run)).0).sum(),
            },
            forks: self.visits.forks(&trace.runs),
            kinds: kinds.collect(),
            repetition: self.visits.repetition(&trace.runs, repetition, conversations.steps.len()),
            notes: trace.notes.clone(),
        }
    }
}

fn kind(step: &TraceStep, position: &ConversationStep, (own, forked): (Tokens, bool)) -> StepKind {
    let relation = match () {
        () if forked => HeadRelation::Diverges,
        () if position.first || own == Tokens::ZERO => HeadRelation::Unknown,
        () if own >= step.prompt => HeadRelation::Equals,
        () => HeadRelation::Extends,
    };
    let idle = position.gap.map(|gap| Micros((gap * 1e6) as u64));
    classify(
        &ClassificationInputs { prompt_tokens: step.prompt, reused_tokens: own, relation, idle },
        &ClassificationThresholds::default(),
    )
}
