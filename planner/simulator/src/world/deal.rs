//! A policy is shown the fleet and asked; its answer is taken apart into what each worker is to do.

use engine_model::runs::{Lent, Memory, Prompt, RunEngine, RunId, Seconds, Ticket, Where};
use planner::Sources;
use vocabulary::Tokens;

use super::late::Late;
use super::stages::Stages;
use super::{Event, Job, World};
use crate::kv::KvModel;
use crate::policies::{Admission, Ask, Dispatch, Fetch, Fleet, Policy, StepRef};
use crate::spec::Spec;
use crate::trace::{Arrivals, Step};

/// What is on its way to a worker.
#[derive(Default)]
pub(super) struct Fetched {
    runs: Vec<RunId>,
    /// Of these, what its source keeps in device memory until it has left.
    lent: Vec<RunId>,
    pub(super) ready: Seconds,
}

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
        let watch = self.seat.watch;
        let dealt = self.deal(|policy, fleet| {
            let ask = Ask { at, step, alone, held: late.as_ref().unwrap_or(&held) };
            (policy.admit(&ask, fleet) == Admission::Now).then(|| {
                watch.iter().for_each(|watch| watch.start());
                let dispatch = policy.place(&ask, fleet);
                watch.iter().for_each(|watch| watch.stop());
                dispatch
            })
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

    /// Seconds to load what lies in slower tiers, but for the leading tokens that were sent.
    pub(super) fn restoring(&self, held: &Memory, sent: Tokens) -> f64 {
        let sizes = &self.setup.spec.sizes;
        let Memory { device, with_host, with_disk } = *held;
        let above_host = device.max(sent);
        let host = (with_host - above_host).0 as f64 / sizes.host_tokens_per_second;
        host + (with_disk - with_host.max(sent)).0 as f64 / sizes.disk_speed.read
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
        self.links.ahead.dispatched((at, step), dispatch.prefill);
        let ticket = Ticket(u32::try_from(self.jobs.len()).expect("a trace has fewer steps"));
        let (prefill, decode) = (dispatch.prefill, dispatch.decode);
        let Fetched { runs: fetched, lent, ready } =
            dispatch.fetch.map_or_else(Fetched::default, |fetch| self.fetch(ticket, step, (fetch, prefill)));
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
            fetched,
            ready,
            expected,
            expected_work: self.setup.spec.timing.prefill(expected, cached) + self.restoring(&held[prefill], sent),
        };
        let best = if self.shared.is_some() { Tokens::ZERO } else { deepest(held) };
        dispatch.foretold.iter().for_each(|foretold| self.tally.action(foretold.action));
        let stages = Stages::placed((since, self.now), ready);
        self.jobs.push(Some(Job::new((at, stages), *dispatch, (lent, best))));
        if answered == Where::Elsewhere {
            self.engines[decode].engine.expect_arrival();
        }
        self.engines[decode].engine.expect_answer(step.prompt);
        self.engines[prefill].engine.submit(prompt);
        self.wake(prefill);
    }

    /// Sends what lacks, and keeps it where it comes from until it has left.
    pub(super) fn fetch(&mut self, ticket: Ticket, step: &Step, (fetch, to): (Fetch, usize)) -> Fetched {
        let runs = &self.trace.runs;
        let (source, target) = (&self.engines[fetch.from].engine, &self.engines[to].engine);
        let until = fetch.until.min(source.holds(runs, &step.path).with_disk);
        let wanted = step.path.iter().take_while(|run| runs.depth(**run) <= until);
        let fetched: Vec<_> = wanted.copied().filter(|run| !target.has(*run)).collect();
        if fetched.is_empty() {
            return Fetched::default();
        }
        let tokens = fetched.iter().map(|run| runs.room(*run)).sum();
        let turn = self.turn_of_sending(fetch.from);
        let Lent { kept, loads } = self.engines[fetch.from].engine.lend(runs, &fetched);
        let asked = self.now + Seconds(loads);
        // Nothing lies on the link while it waits for its turn.
        let ready =
            self.links.send(asked, (fetch.from, to), tokens).max(asked + Seconds(turn + self.links.takes(tokens)));
        self.events.add(ready, Event::Fetched(ticket));
        Fetched { runs: fetched, lent: kept, ready }
    }

    /// Seconds until a worker sends what it is asked for now: behind the prompts that it has, and once it has made the one token
    /// that ends such a request.
    fn turn_of_sending(&self, from: usize) -> f64 {
        let Spec { link, timing, .. } = &self.setup.spec;
        match link.sources {
            Sources::AtOnce => 0.0,
            Sources::InTurn => self.engines[from].engine.prefill_left(self.now) + timing.step,
        }
    }

    /// What a prompt was waiting for is there.
    pub(super) fn fetched(&mut self, ticket: Ticket) {
        let runs = &self.trace.runs;
        let job = self.job(ticket);
        let (dispatch, lent) = (job.dispatch, std::mem::take(&mut job.lent));
        if let Some(Fetch { from, .. }) = dispatch.fetch {
            self.engines[from].engine.lent(runs, &lent);
            self.wake(dispatch.prefill);
            self.wake(from);
        }
    }
}

fn deepest(held: &[Memory]) -> Tokens {
    held.iter().map(|memory| memory.device).max().unwrap_or_default()
}
