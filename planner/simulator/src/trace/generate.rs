//! Generates synthetic traffic of two patterns that recordings rarely contain alone, in the format of recorded agent
//! sessions.

use serde::Serialize;

use crate::SeededRng;

/// Tokens per block of this format.
const BLOCK: u64 = 64;

/// What sessions have in common.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SharingPattern {
    /// Every session starts with one of a few prefixes, whose frequency is proportional to 1 / rank.
    SharedPrefix {
        /// Number of different prefixes.
        prefixes: u32,
    },
    /// Every session has its own context, from which branches continue at the same time; when all are over, the session
    /// itself continues.
    ForkedRollouts {
        /// Number of branches per session.
        branches: u32,
    },
}

/// Parameters of the traffic. Lengths and pauses are means: values are uniform from half to one and a half times the
/// mean.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Workload {
    /// What sessions have in common.
    pub shape: SharingPattern,
    /// Number of sessions.
    pub sessions: u32,
    /// Tokens of a prefix, or of the context that branches share; exact.
    pub shared_tokens: u64,
    /// Steps per session, or per branch.
    pub turns: u32,
    /// Tokens that a step adds besides the previous answer.
    pub new_tokens: u64,
    /// Tokens per answer.
    pub answer: u64,
    /// Seconds between an answer and the next step.
    pub pause: f64,
    /// Random seed: equal seeds give equal traffic.
    pub seed: u64,
}

#[derive(Serialize)]
struct GeneratedSession {
    id: String,
    block_size: u64,
    models: [&'static str; 1],
    tool_tokens: u64,
    system_tokens: u64,
    reqs: Vec<GeneratedRequest>,
}

/// A request as the delta to an earlier one.
#[derive(Serialize)]
struct GeneratedRequest {
    t: f64,
    agent: u32,
    #[serde(rename = "in")]
    prompt: u64,
    #[serde(rename = "out")]
    answer: u64,
    think: f64,
    api: f64,
    par: i64,
    keep: u64,
    runs: Vec<(u64, u64)>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sub: Option<GeneratedSubAgentTag>,
}

#[derive(Serialize)]
struct GeneratedSubAgentTag {
    #[serde(rename = "type")]
    kind: &'static str,
}

impl Workload {
    /// Returns one session as a line of JSON.
    pub fn session_line(&self, session: u32) -> String {
        let mut making =
            SessionGenerator { workload: self, rng: self.session_rng(session), reqs: Vec::new(), next_id: 1 };
        let tool_tokens = match self.shape {
            SharingPattern::SharedPrefix { prefixes } => making.with_prefix(prefixes),
            SharingPattern::ForkedRollouts { branches } => making.with_branches(branches),
        };
        let (id, models) = (format!("generated-{}-{session}", self.seed), ["generated"]);
        let line = GeneratedSession { id, block_size: BLOCK, models, tool_tokens, system_tokens: 0, reqs: making.reqs };
        serde_json::to_string(&line).expect("numbers and words make JSON")
    }

    /// Returns the random stream of a session. Streams are separate, so more sessions do not change the first ones.
    fn session_rng(&self, session: u32) -> SeededRng {
        SeededRng::new(SeededRng::new(self.seed).draw() ^ u64::from(session))
    }
}

struct SessionGenerator<'a> {
    workload: &'a Workload,
    rng: SeededRng,
    reqs: Vec<GeneratedRequest>,
    /// Id of the next block.
    next_id: u64,
}

impl SessionGenerator<'_> {
    /// Starts a session with a shared prefix. Returns its number of tokens, which also identifies the prefix.
    fn with_prefix(&mut self, prefixes: u32) -> u64 {
        let rank = self.sample_rank(prefixes);
        let tools = self.workload.shared_tokens + BLOCK * u64::from(rank);
        let first = tools + self.sample_around(self.workload.new_tokens);
        self.push_request((0, None), (None, first));
        self.turns(0, self.workload.turns.saturating_sub(1));
        tools
    }

    fn with_branches(&mut self, branches: u32) -> u64 {
        self.push_request((0, None), (None, self.workload.shared_tokens));
        let context = self.reqs.len() - 1;
        for agent in 1..=branches {
            let prompt = self.next_prompt_len(context);
            self.push_request((agent, Some(GeneratedSubAgentTag { kind: "branch" })), (Some(context), prompt));
            self.turns(agent, self.workload.turns.saturating_sub(1));
        }
        let prompt = self.next_prompt_len(context);
        self.push_request((0, None), (Some(context), prompt));
        0
    }

    /// Adds requests of an agent, each of which continues the last one.
    fn turns(&mut self, agent: u32, turns: u32) {
        for _ in 0..turns {
            let last = self.reqs.len() - 1;
            let prompt = self.next_prompt_len(last);
            self.push_request((agent, None), (Some(last), prompt));
        }
    }

    /// Returns the length of the next prompt: the previous prompt and answer, and new tokens.
    fn next_prompt_len(&mut self, last: usize) -> u64 {
        self.reqs[last].prompt + self.reqs[last].answer + self.sample_around(self.workload.new_tokens)
    }

    fn push_request(
        &mut self,
        (agent, sub): (u32, Option<GeneratedSubAgentTag>),
        (last, prompt): (Option<usize>, u64),
    ) {
        let (answer, think) =
            (self.sample_around(self.workload.answer), self.workload.pause * (0.5 + self.sample_unit()));
        let before = last.map(|last| &self.reqs[last]);
        let (keep, t) = before.map_or((0, 0.0), |last| (last.prompt / BLOCK, last.t + last.api + think));
        let added = prompt / BLOCK - keep;
        let runs = if added > 0 { vec![(self.next_id, added)] } else { Vec::new() };
        self.next_id += added;
        let par = last.map_or(-1, |last| last as i64);
        let think = if last.is_some() { think } else { 0.0 };
        // The duration of the answer has no effect: it is only used to infer pauses that are not given.
        self.reqs.push(GeneratedRequest { t, agent, prompt, answer, think, api: 1.0, par, keep, runs, sub });
    }

    /// Returns a uniform number from half to one and a half times the mean, at least one.
    fn sample_around(&mut self, mean: u64) -> u64 {
        (mean / 2 + self.rng.below(mean.max(1) + 1)).max(1)
    }

    fn sample_unit(&mut self) -> f64 {
        self.rng.below(1_000_001) as f64 / 1e6
    }

    /// Returns one of `among` ranks, with probability proportional to 1 / (rank + 1).
    fn sample_rank(&mut self, among: u32) -> u32 {
        let weight = |rank: u32| 1.0 / f64::from(rank + 1);
        let mut left = self.sample_unit() * (0..among).map(weight).sum::<f64>();
        for rank in 0..among {
            left -= weight(rank);
            if left <= 0.0 {
                return rank;
            }
        }
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::{RepeatedPrefixCriteria, TraceStats};
    use crate::trace::{Trace, TraceLoader};

    const PREFIX: Workload = Workload {
        shape: SharingPattern::SharedPrefix { prefixes: 3 },
        sessions: 40,
        shared_tokens: 16_000,
        turns: 5,
        new_tokens: 800,
        answer: 200,
        pause: 4.0,
        seed: 7,
    };
    const FORKED: Workload = Workload {
        shape: SharingPattern::ForkedRollouts { branches: 8 },
        sessions: 5,
        shared_tokens: 20_000,
        turns: 3,
        ..PREFIX
    };

    fn trace(of: &Workload) -> Trace {
        let text: Vec<String> = (0..of.sessions).map(|session| of.session_line(session)).collect();
        let mut reader = TraceLoader::default();
        reader.read("generated", &text.join("\n")).unwrap();
        reader.finish().unwrap().unwrap()
    }

    #[test]
    fn generated_sessions_share_exactly_the_blocks_of_their_prefix() {
        let trace = trace(&PREFIX);
        assert_eq!(trace.steps().count(), 40 * 5);
        let first = |session: usize| &trace.sessions[session].steps[0].path;
        let shared = |a: usize, b: usize| {
            let common = first(a).iter().zip(first(b).iter()).take_while(|(a, b)| a == b).count();
            trace.runs.end_depth(&first(a)[..common]).0
        };
        let shares: Vec<u64> = (1..40).map(|session| shared(0, session)).collect();
        assert!(shares.iter().all(|tokens| *tokens == 0 || (16_000..16_200).contains(tokens)), "{shares:?}");
        let many = shares.iter().filter(|tokens| **tokens > 0).count();
        assert!((5..35).contains(&many), "three prefixes: {shares:?}");
    }

    #[test]
    fn branches_start_together_and_the_session_waits_for_all_of_them() {
        let trace = trace(&FORKED);
        let steps = &trace.sessions[0].steps;
        assert_eq!(steps.len(), 1 + 8 * 3 + 1);
        let begins: Vec<_> = steps.iter().filter(|step| step.after == [0]).collect();
        assert_eq!(begins.len(), 8);
        let context = trace.runs.end_depth(&steps[0].path);
        assert_eq!(context.0, 20_000 / 64 * 64);
        let known = steps[0].path.len();
        assert!(begins.iter().all(|step| step.path[..known] == steps[0].path[..] && step.path.len() > known));
        assert_eq!(steps.last().unwrap().after.len(), 8, "it waits for every branch's last step");
        let stats = TraceStats::of(&trace, RepeatedPrefixCriteria::default());
        assert_eq!((stats.forks.nodes, stats.forks.children.max), (5, 9.0));
    }

    #[test]
    fn generated_sessions_depend_only_on_seed_and_number() {
        assert_eq!(PREFIX.session_line(3), Workload { sessions: 90, ..PREFIX }.session_line(3));
        assert_ne!(PREFIX.session_line(3), Workload { seed: 8, ..PREFIX }.session_line(3));
        assert_ne!(PREFIX.session_line(3), PREFIX.session_line(4));
    }
}
