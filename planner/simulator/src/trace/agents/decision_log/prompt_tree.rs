//! Reconstructs shared blocks in a decision log: assigns ids such that each step's reused prefix equals earlier
//! content.

use vocabulary::{Micros, Tokens};

use super::{BLOCK, LoggedStep};
use crate::trace::TraceEntryBudget;
use crate::trace::block_ids::PromptBlockIds;
use crate::trace::error::{TraceError, TraceLocation};
use crate::trace::run_builder::RadixBuilder;
use crate::trace::{TraceSession, TraceStep};
use engine_model::runs::RunTree;

/// A session's own blocks have consecutive ids, so that a history consists of few ranges.
const ID_BITS: u32 = 32;

/// Position of a step: session and step index.
type SessionStepIndex = (usize, usize);

/// The prompts of all steps, in one tree.
#[derive(Default)]
pub(super) struct PromptTree {
    radix: RadixBuilder,
    sessions: Vec<SessionPrompts>,
    /// Steps longer than all earlier ones, with their blocks.
    longest: Vec<(u32, SessionStepIndex)>,
    /// Blocks that steps reused but no earlier step had: they were cached before the log begins.
    before_log: PromptBlockIds,
    prompts: Tokens,
    known: Tokens,
    /// Known tokens that no earlier step had.
    not_in_log: Tokens,
}

/// Data of one session's steps, in order.
#[derive(Default)]
struct SessionPrompts {
    /// Numbers of the prompts in the tree.
    lists: Vec<usize>,
    /// Block ids of prompt and answer.
    histories_by_step: Vec<PromptBlockIds>,
    /// Prompt that resends the answer, and its end in blocks.
    resent_answers: Vec<Option<(usize, u32)>>,
    /// Blocks that appeared in this session first.
    own_blocks: u64,
}

fn blocks(tokens: Tokens) -> u32 {
    (tokens.0 / u64::from(BLOCK)) as u32
}

impl PromptTree {
    /// Builds the tree of sessions whose steps are in chronological order.
    pub(super) fn of(sessions: &[(String, Vec<LoggedStep>)]) -> Self {
        let prompts = sessions.iter().map(|_| SessionPrompts::default()).collect();
        let mut shared = Self { sessions: prompts, ..Self::default() };
        let places = |(session, (_, steps)): (usize, &(String, Vec<LoggedStep>))| {
            steps.iter().enumerate().map(move |(step, served)| (served.at, (session, step))).collect::<Vec<_>>()
        };
        let mut order: Vec<(Micros, SessionStepIndex)> = sessions.iter().enumerate().flat_map(places).collect();
        order.sort();
        order.iter().for_each(|(_, at)| shared.add(*at, sessions));
        shared
    }

    fn add(&mut self, (session, step): SessionStepIndex, sessions: &[(String, Vec<LoggedStep>)]) {
        let served = &sessions[session].1[step];
        let need = blocks(Tokens(served.reused));
        let source = self.find_source(session, need);
        let (mut ids, missed) = match source {
            Some((other, at)) => {
                let ids = self.sessions[other].histories_by_step[at].first(need);
                let missed = need - ids.len();
                (ids, missed)
            }
            None => self.ids_before_log(need),
        };
        self.extend_with_new_ids(&mut ids, session, blocks(served.prompt));
        let list = self.radix.insert(ids.clone());
        if let Some(at) = source {
            self.record_resend(at, (list, need), &sessions[at.0].1[at.1]);
        }
        self.extend_with_new_ids(&mut ids, session, blocks(served.prompt + served.answer));
        if self.longest.last().is_none_or(|(blocks, _)| *blocks < ids.len()) {
            self.longest.push((ids.len(), (session, step)));
        }
        let prompts = &mut self.sessions[session];
        prompts.lists.push(list);
        prompts.histories_by_step.push(ids);
        prompts.resent_answers.push(None);
        self.prompts += served.prompt;
        self.known += Tokens(served.reused);
        self.not_in_log += Tokens(u64::from(missed) * u64::from(BLOCK));
    }

    /// Returns the step whose history a step continues that reused `need` blocks.
    fn find_source(&self, session: usize, need: u32) -> Option<SessionStepIndex> {
        if need == 0 {
            return None;
        }
        let own = &self.sessions[session].histories_by_step;
        let latest = own.iter().rposition(|history| history.len() >= need).map(|step| (session, step));
        let other = || self.longest.get(self.longest.partition_point(|(blocks, _)| *blocks < need)).map(|(_, at)| *at);
        let most = || (0..own.len()).max_by_key(|step| own[*step].len()).map(|step| (session, step));
        // If the session's own history covers at least half, its answers were longer than the log says.
        let is_most = most().is_some_and(|(_, step)| own[step].len() >= need / 2);
        latest.or_else(|| if is_most { most() } else { other().or_else(most) })
    }

    /// Returns ids for `need` blocks cached before the log begins, and how many of them are used for the first time.
    fn ids_before_log(&mut self, need: u32) -> (PromptBlockIds, u32) {
        let known = self.before_log.len();
        let first = (self.sessions.len() as u64) << ID_BITS;
        let fresh = need.saturating_sub(known);
        self.before_log.push_run(first + u64::from(known), fresh);
        (self.before_log.first(need), fresh)
    }

    fn extend_with_new_ids(&mut self, ids: &mut PromptBlockIds, session: usize, end: u32) {
        let (count, told) = (end.saturating_sub(ids.len()), &mut self.sessions[session]);
        ids.push_run(((session as u64) << ID_BITS) + told.own_blocks, count);
        told.own_blocks += u64::from(count);
    }

    /// Records that a later prompt contains the answer of a step, up to the block `end`.
    fn record_resend(&mut self, (session, step): SessionStepIndex, (list, end): (usize, u32), served: &LoggedStep) {
        let end = end.min(blocks(served.prompt + served.answer));
        let longer = self.sessions[session].resent_answers[step].is_none_or(|(_, before)| before < end);
        if longer && end > blocks(served.prompt) {
            self.sessions[session].resent_answers[step] = Some((list, end));
        }
    }

    /// Returns a note on how much comes from the log itself, and how much is inferred.
    pub(super) fn note(&self) -> Option<String> {
        let share = 100.0 * self.known.0 as f64 / self.prompts.0.max(1) as f64;
        let unseen = match self.not_in_log {
            Tokens::ZERO => String::new(),
            Tokens(unseen) => format!(
                "; {unseen} of these tokens lie in no earlier step of the log and count as new here: they were there \
                 before it begins, or answers were longer than it tells"
            ),
        };
        let text = format!(
            "the log's steps found {share:.2} % of their prompt tokens known, answers of earlier steps among them{unseen}"
        );
        (self.prompts > Tokens::ZERO).then_some(text)
    }

    /// Returns all sessions, with prompts cut into runs.
    pub(super) fn into_sessions(
        mut self,
        sessions: Vec<(String, Vec<LoggedStep>)>,
        (runs, budget): (&mut RunTree, &mut TraceEntryBudget),
    ) -> Result<Vec<TraceSession>, TraceError> {
        for (list, end) in self.sessions.iter().flat_map(|told| told.resent_answers.iter().flatten()) {
            self.radix.cut(*list, *end);
        }
        self.radix.freeze(BLOCK, runs, None);
        let mut all = Vec::with_capacity(sessions.len());
        for ((id, served), told) in sessions.into_iter().zip(&self.sessions) {
            let steps = self.steps(&served, told);
            let path_length =
                |step: &TraceStep| step.path.len() + step.resent_path.as_ref().map_or(0, |path| path.len());
            budget.take(TraceLocation { file: &id, line: 1 }, steps.iter().map(path_length).sum())?;
            all.push(TraceSession { id: id.into(), steps });
        }
        Ok(all)
    }

    fn steps(&self, served: &[LoggedStep], prompts: &SessionPrompts) -> Vec<TraceStep> {
        let begin = served.first().map_or(Micros::ZERO, |first| first.at);
        let step = |(index, one): (usize, &LoggedStep)| {
            let before = index.checked_sub(1);
            let pause = before.map_or(Micros::ZERO, |before| one.at - (served[before].at + served[before].duration));
            let resent = prompts.resent_answers[index].map(|(list, end)| self.radix.path(list, end).into());
            TraceStep {
                agent: 0,
                after: before.into_iter().collect(),
                pause,
                at: one.at - begin,
                prompt: one.prompt,
                answer: one.answer,
                path: self.radix.path(prompts.lists[index], u32::MAX).into(),
                resent_path: resent,
            }
        };
        served.iter().enumerate().map(step).collect()
    }
}
