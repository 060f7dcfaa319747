//! A policy is shown the fleet and asked; its answer is taken apart into what each worker is to do.

use engine_model::runs::{Memory, Prompt, RunEngine, RunId, Seconds, Ticket, Where};
use vocabulary::Tokens;

use super::late::Late;
use super::stages::Stages;
use super::{Event, Job, World};
use crate::kv::KvModel;
use crate::policies::{Admission, Ask, Dispatch, Fetch, Fleet, Policy, StepRef};
use crate::trace::{Arrivals, Step};

impl World<'_> {
    /// Asks the policy something, with the fleet before it.
    pub(super) fn deal<T>(&mut self, ask: impl FnOnce(&mut dyn Policy, &Fleet<'_>) -> T) -> T {
        let engines: Vec<&RunEngine> = self.engines.iter().map(|worker| &worker.engine).collect();
        let fleet = Fleet {
            now: self.now,
            workers: &engines,
            spec: &self.setup.spec,
            runs: &self.trace.runs,
            block: self.trace.block,
            attention: self.seat.model.as_deref().map(KvModel::planned),
        };
        ask(&mut *self.seat.policy, &fleet)
    }

    /// A step wants to be served; it has wanted to `since` then.
    pub(super) fn arrive(&mut self, at: StepRef, since: Seconds) {
        let trace = self.trace;
        let step = &trace.sessions[at.session].steps[at.step];
        let alone = trace.arrivals == Arrivals::Recorded;
        let held = self.held(step);
        let late = self.seat.late.as_ref().map(|late| self.known(late, step, &held));
        let dealt = self.deal(|policy, fleet| {
            let ask = Ask { at, step, alone, held: late.as_ref().unwrap_or(&held) };
            (policy.admit(&ask, fleet) == Admission::Now).then(|| policy.place(&ask, fleet))
        });
        let Some(dispatch) = dealt else {
            self.script.wait(at, since);
            if let Some(after) = self.seat.policy.look_again() {
                self.events.add(self.now + after, Event::PolicyClock);
            }
            return;
        };
        self.dispatch((at, step), since, (&dispatch, &held));
    }

    fn held(&self, step: &Step) -> Vec<Memory> {
        let runs = &self.trace.runs;
        if let Some(shared) = &self.shared {
            let found = shared.matched(runs, &step.path);
            return vec![Memory::on_device(found); self.engines.len()];
        }
        self.engines.iter().map(|worker| worker.engine.holds(runs, &step.path)).collect()
    }

    /// What the policy is shown of it.
    fn known(&self, late: &Late, step: &Step, held: &[Memory]) -> Vec<Memory> {
        let known = |(worker, memory): (usize, &Memory)| {
            let device = late.matched(worker, &self.trace.runs, &step.path);
            let sizes = &self.setup.spec.sizes;
            let below =
                |size: Tokens, now: Tokens, known: Tokens| if size > Tokens::ZERO { now.max(known) } else { known };
            let with_host = below(sizes.host, memory.with_host, device);
            Memory { device, with_host, with_disk: below(sizes.disk, memory.with_disk, with_host) }
        };
        held.iter().enumerate().map(known).collect()
    }

    fn dispatch(&mut self, (at, step): (StepRef, &Step), since: Seconds, (dispatch, held): (&Dispatch, &[Memory])) {
        let ticket = Ticket(u32::try_from(self.jobs.len()).expect("a trace has fewer steps"));
        let (prefill, decode) = (dispatch.prefill, dispatch.decode);
        let (fetched, ready) =
            dispatch.fetch.map_or((Vec::new(), Seconds::ZERO), |fetch| self.fetch(ticket, step, (fetch, prefill)));
        let there = held[prefill].with_disk;
        let sent = dispatch.fetch.filter(|_| !fetched.is_empty()).map_or(Tokens::ZERO, |fetch| fetch.until);
        let cached = there.max(sent);
        let expected = (step.prompt - cached).max(Tokens(1));
        let answered = if prefill == decode { Where::Here } else { Where::Elsewhere };
        let prompt = Prompt {
            ticket,
            path: step.path.clone(),
            tokens: step.prompt,
            answer: step.answer,
            resent: step.resent.clone(),
            answered,
            fetched: fetched.clone(),
            ready,
            expected,
            expected_work: self.setup.spec.timing.prefill(expected, cached),
        };
        let best = if self.shared.is_some() { Tokens::ZERO } else { deepest(held) };
        dispatch.foretold.iter().for_each(|foretold| self.tally.action(foretold.action));
        let stages = Stages::placed((since, self.now), ready);
        self.jobs.push(Some(Job::new((at, stages), *dispatch, (fetched, best))));
        if answered == Where::Elsewhere {
            self.engines[decode].engine.expect_arrival();
        }
        self.engines[decode].engine.expect_answer(step.prompt);
        self.engines[prefill].engine.submit(prompt);
        self.wake(prefill);
    }

    /// Sends what lacks, and keeps it where it comes from until it has left.
    fn fetch(&mut self, ticket: Ticket, step: &Step, (fetch, to): (Fetch, usize)) -> (Vec<RunId>, Seconds) {
        let runs = &self.trace.runs;
        let wanted = step.path.iter().take_while(|run| runs.depth(**run) <= fetch.until);
        let (source, target) = (&self.engines[fetch.from].engine, &self.engines[to].engine);
        let fetched: Vec<_> = wanted.copied().filter(|run| source.has(*run) && !target.has(*run)).collect();
        if fetched.is_empty() {
            return (fetched, Seconds::ZERO);
        }
        let tokens = fetched.iter().map(|run| runs.room(*run)).sum();
        let ready = self.links.send(self.now, (fetch.from, to), tokens);
        self.engines[fetch.from].engine.lend(runs, &fetched);
        self.events.add(ready, Event::Fetched(ticket));
        (fetched, ready)
    }

    /// What a prompt was waiting for is there.
    pub(super) fn fetched(&mut self, ticket: Ticket) {
        let runs = &self.trace.runs;
        let job = self.job(ticket);
        let (dispatch, fetched) = (job.dispatch, std::mem::take(&mut job.fetched));
        if let Some(Fetch { from, .. }) = dispatch.fetch {
            self.engines[from].engine.lent(runs, &fetched);
            self.wake(dispatch.prefill);
            self.wake(from);
        }
    }
}

fn deepest(held: &[Memory]) -> Tokens {
    held.iter().map(|memory| memory.device).max().unwrap_or_default()
}
