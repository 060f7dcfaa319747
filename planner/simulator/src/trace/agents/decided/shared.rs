//! Which blocks the steps of a decision log share: ids that make what each step found known the same as what was there.

use vocabulary::{Micros, Tokens};

use super::{BLOCK, Served};
use crate::trace::block_ids::BlockIds;
use crate::trace::budget::Budget;
use crate::trace::error::{Place, TraceError};
use crate::trace::radix::Radix;
use crate::trace::{Session, Step};
use engine_model::runs::Runs;

/// Ids of a session's own blocks are neighbours, so that a history is few runs of them.
const IDS: u32 = 32;

/// One step's place: which session, and which of its steps.
type At = (usize, usize);

/// The prompts of all steps, in one tree.
#[derive(Default)]
pub(super) struct Shared {
    radix: Radix,
    told: Vec<Told>,
    /// Those that were longer than all before them, with their blocks.
    longest: Vec<(u32, At)>,
    /// What steps found that no earlier one had: it was there before the log begins.
    before: BlockIds,
    prompts: Tokens,
    known: Tokens,
    /// Of these, what no earlier step had.
    unseen: Tokens,
}

/// What is told of one session's steps, in their order.
#[derive(Default)]
struct Told {
    /// Numbers of their prompts in the tree.
    lists: Vec<usize>,
    /// Prompt and answer.
    histories: Vec<BlockIds>,
    /// By whom the answer was sent again, and to which block.
    resent: Vec<Option<(usize, u32)>>,
    /// Blocks that no other session had first.
    own: u64,
}

fn blocks(tokens: Tokens) -> u32 {
    (tokens.0 / u64::from(BLOCK)) as u32
}

impl Shared {
    /// Of sessions whose steps are in the order of their times.
    pub(super) fn of(sessions: &[(String, Vec<Served>)]) -> Self {
        let told = sessions.iter().map(|_| Told::default()).collect();
        let mut shared = Self { told, ..Self::default() };
        let places = |(session, (_, steps)): (usize, &(String, Vec<Served>))| {
            steps.iter().enumerate().map(move |(step, served)| (served.at, (session, step))).collect::<Vec<_>>()
        };
        let mut order: Vec<(Micros, At)> = sessions.iter().enumerate().flat_map(places).collect();
        order.sort();
        order.iter().for_each(|(_, at)| shared.add(*at, sessions));
        shared
    }

    fn add(&mut self, (session, step): At, sessions: &[(String, Vec<Served>)]) {
        let served = &sessions[session].1[step];
        let need = blocks(Tokens(served.reused));
        let source = self.source(session, need);
        let (mut ids, missed) = match source {
            Some((other, at)) => {
                let ids = self.told[other].histories[at].first(need);
                let missed = need - ids.len();
                (ids, missed)
            }
            None => self.earlier_than_all(need),
        };
        self.fresh(&mut ids, session, blocks(served.prompt));
        let list = self.radix.insert(ids.clone());
        if let Some(at) = source {
            self.resend(at, (list, need), &sessions[at.0].1[at.1]);
        }
        self.fresh(&mut ids, session, blocks(served.prompt + served.answer));
        if self.longest.last().is_none_or(|(blocks, _)| *blocks < ids.len()) {
            self.longest.push((ids.len(), (session, step)));
        }
        let told = &mut self.told[session];
        told.lists.push(list);
        told.histories.push(ids);
        told.resent.push(None);
        self.prompts += served.prompt;
        self.known += Tokens(served.reused);
        self.unseen += Tokens(u64::from(missed) * u64::from(BLOCK));
    }

    /// Whose history a step goes on from that found so many blocks known.
    fn source(&self, session: usize, need: u32) -> Option<At> {
        if need == 0 {
            return None;
        }
        let own = &self.told[session].histories;
        let latest = own.iter().rposition(|history| history.len() >= need).map(|step| (session, step));
        let other = || self.longest.get(self.longest.partition_point(|(blocks, _)| *blocks < need)).map(|(_, at)| *at);
        let most = || (0..own.len()).max_by_key(|step| own[*step].len()).map(|step| (session, step));
        // What the session itself had is most of it: then its answers were longer than the log tells.
        let is_most = most().is_some_and(|(_, step)| own[step].len() >= need / 2);
        latest.or_else(|| if is_most { most() } else { other().or_else(most) })
    }

    /// What was there before the log begins, and how much of it no step had found yet.
    fn earlier_than_all(&mut self, need: u32) -> (BlockIds, u32) {
        let known = self.before.len();
        let first = (self.told.len() as u64) << IDS;
        let fresh = need.saturating_sub(known);
        self.before.push_run(first + u64::from(known), fresh);
        (self.before.first(need), fresh)
    }

    fn fresh(&mut self, ids: &mut BlockIds, session: usize, end: u32) {
        let (count, told) = (end.saturating_sub(ids.len()), &mut self.told[session]);
        ids.push_run(((session as u64) << IDS) + told.own, count);
        told.own += u64::from(count);
    }

    /// A later prompt, up to a block of it, holds what the step at `at` answered.
    fn resend(&mut self, (session, step): At, (list, end): (usize, u32), served: &Served) {
        let end = end.min(blocks(served.prompt + served.answer));
        let longer = self.told[session].resent[step].is_none_or(|(_, before)| before < end);
        if longer && end > blocks(served.prompt) {
            self.told[session].resent[step] = Some((list, end));
        }
    }

    /// What the log itself says, beside what is figured out from it.
    pub(super) fn note(&self) -> Option<String> {
        let share = 100.0 * self.known.0 as f64 / self.prompts.0.max(1) as f64;
        let unseen = match self.unseen {
            Tokens::ZERO => String::new(),
            Tokens(unseen) => format!(
                "; {unseen} of these tokens lie in no earlier step of the log and count as new here: they were there \
                 before it begins, or answers were longer than it tells"
            ),
        };
        let told = format!(
            "the log's steps found {share:.2} % of their prompt tokens known, answers of earlier steps among them{unseen}"
        );
        (self.prompts > Tokens::ZERO).then_some(told)
    }

    /// All sessions, with prompts cut into runs.
    pub(super) fn frozen(
        mut self,
        sessions: Vec<(String, Vec<Served>)>,
        (runs, budget): (&mut Runs, &mut Budget),
    ) -> Result<Vec<Session>, TraceError> {
        for (list, end) in self.told.iter().flat_map(|told| told.resent.iter().flatten()) {
            self.radix.cut(*list, *end);
        }
        self.radix.freeze(BLOCK, runs, None);
        let mut all = Vec::with_capacity(sessions.len());
        for ((id, served), told) in sessions.into_iter().zip(&self.told) {
            let steps = self.steps(&served, told);
            let taken = |step: &Step| step.path.len() + step.resent.as_ref().map_or(0, |path| path.len());
            budget.take(Place { file: &id, line: 1 }, steps.iter().map(taken).sum())?;
            all.push(Session { id: id.into(), steps });
        }
        Ok(all)
    }

    fn steps(&self, served: &[Served], told: &Told) -> Vec<Step> {
        let begin = served.first().map_or(Micros::ZERO, |first| first.at);
        let step = |(index, one): (usize, &Served)| {
            let before = index.checked_sub(1);
            let pause = before.map_or(Micros::ZERO, |before| one.at - (served[before].at + served[before].took));
            let resent = told.resent[index].map(|(list, end)| self.radix.path(list, end).into());
            Step {
                agent: 0,
                after: before.into_iter().collect(),
                think: pause,
                at: one.at - begin,
                prompt: one.prompt,
                answer: one.answer,
                path: self.radix.path(told.lists[index], u32::MAX).into(),
                resent,
            }
        };
        served.iter().enumerate().map(step).collect()
    }
}
