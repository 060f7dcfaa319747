//! What becomes of a step that was dispatched.

use engine_model::runs::{Around, Happening, Prefilled, RunId, Seconds, Started, Ticket};
use vocabulary::Tokens;

use super::stages::Stages;
use super::{Event, NEXT_SESSION, World};
use crate::policies::{Dispatch, Ship, StepRef};

/// How long a decode worker without room is given between two tries, and after how many the prefill worker answers.
const NO_ROOM: Seconds = Seconds(0.05);
const MOST_TRIES: u32 = 100;

/// A step under way.
pub(super) struct Job {
    at: StepRef,
    stages: Stages,
    /// The deepest that any worker held of its prompt when it was placed.
    best: Tokens,
    pub(super) dispatch: Dispatch,
    /// What its source keeps until it has left.
    pub(super) lent: Vec<RunId>,
    prefilled: Option<Prefilled>,
    tries: u32,
}

impl Job {
    pub(super) fn new((at, stages): (StepRef, Stages), dispatch: Dispatch, (lent, best): (Vec<RunId>, Tokens)) -> Self {
        Self { at, stages, best, dispatch, lent, prefilled: None, tries: 0 }
    }
}

impl World<'_> {
    pub(super) fn record(&mut self, worker: usize, happenings: Vec<Happening>) {
        for happening in happenings {
            match happening {
                Happening::Started(started) => self.started(&started),
                Happening::Prefilled(prefilled) => self.ship(worker, prefilled),
                Happening::FirstToken(ticket) => {
                    self.job(ticket).stages.computed = self.now;
                    self.first_token(ticket);
                }
                Happening::Finished(ticket) => self.finished(ticket),
            }
        }
    }

    fn started(&mut self, started: &Started) {
        let (trace, now) = (self.trace, self.now);
        let job = self.job(started.ticket);
        let (at, best) = (job.at, job.best);
        let step = &trace.sessions[at.session].steps[at.step];
        let again = self.tally.started(&trace.runs, (at, step), (started, best));
        self.job(started.ticket).stages.begin(now, started, again);
    }

    fn first_token(&mut self, ticket: Ticket) {
        let now = self.now;
        let job = self.job(ticket);
        job.stages.first_token = now;
        let (at, stages, foretold) = (job.at, job.stages, job.dispatch.foretold);
        self.tally.first_token(at, &stages);
        foretold.iter().for_each(|foretold| self.tally.foretold(foretold, now - stages.placed));
    }

    /// The prompt's KV leaves for the worker that answers.
    fn ship(&mut self, worker: usize, prefilled: Prefilled) {
        let (now, runs) = (self.now, &self.trace.runs);
        let ticket = prefilled.prompt.ticket;
        self.job(ticket).stages.computed = now;
        let Dispatch { decode, ship, .. } = self.job(ticket).dispatch;
        let there = match ship {
            Ship::Whole => Tokens::ZERO,
            Ship::Missing => self.engines[decode].engine.holds(runs, &prefilled.prompt.path).device,
        };
        let arrived = self.links.send(now, (worker, decode), prefilled.prompt.tokens - there + runs.windows());
        self.job(ticket).prefilled = Some(prefilled);
        self.events.add(arrived, Event::Shipped(ticket));
    }

    /// The KV is there; without room for it the step waits.
    pub(super) fn shipped(&mut self, ticket: Ticket) {
        let (now, runs) = (self.now, &self.trace.runs);
        let job = self.job(ticket);
        let (Dispatch { prefill, decode, .. }, tries) = (job.dispatch, job.tries);
        let Some(prefilled) = job.prefilled.take() else { return };
        let around = Around { runs, shared: self.shared.as_mut() };
        let target = &mut self.engines[decode].engine;
        // Its batch is about to change.
        target.settle(now, &around);
        if target.receive(runs, prefilled.prompt.clone()).is_err() {
            if tries >= MOST_TRIES && self.kind.mixes() {
                self.answer_at_source((prefill, decode), prefilled);
                return;
            }
            let job = self.job(ticket);
            (job.tries, job.prefilled) = (tries + 1, Some(prefilled));
            self.events.add(now + NO_ROOM, Event::Shipped(ticket));
            return;
        }
        self.first_token(ticket);
        self.engines[prefill].engine.release(runs, &prefilled);
        self.wake(decode);
        self.wake(prefill);
    }

    /// Two workers that wait for each other's memory would wait for ever: the step is answered where its prompt is.
    fn answer_at_source(&mut self, (prefill, decode): (usize, usize), prefilled: Prefilled) {
        let ticket = prefilled.prompt.ticket;
        self.engines[decode].engine.expect_no_more(prefilled.prompt.tokens);
        let around = Around { runs: &self.trace.runs, shared: self.shared.as_mut() };
        let engine = &mut self.engines[prefill].engine;
        engine.settle(self.now, &around);
        engine.answer_here(prefilled);
        self.first_token(ticket);
        self.wake(prefill);
    }

    fn finished(&mut self, ticket: Ticket) {
        let trace = self.trace;
        let Some(job) = self.jobs[ticket.0 as usize].take() else { return };
        let step = &trace.sessions[job.at.session].steps[job.at.step];
        self.tally.finished((job.at, step), self.now, &job.stages);
        self.seat.policy.finished(job.at, step, self.now);
        if self.shared.is_none() && self.tally.is_time_to_look() {
            let engines: Vec<_> = self.engines.iter().map(|worker| &worker.engine).collect();
            self.tally.looks.look(&engines, &trace.runs);
        }
        let Some(followed) = self.script.end(job.at) else { return };
        for step in followed.steps {
            let think = Seconds::from(trace.sessions[job.at.session].steps[step].think);
            self.events.add(self.now + think, Event::Arrives(StepRef { step, ..job.at }));
        }
        if followed.over {
            self.seat.policy.session_over(job.at.session);
            self.tally.session_over(job.at.session);
            self.events.add(self.now + Seconds(NEXT_SESSION), Event::SessionStarts);
        }
    }
}
