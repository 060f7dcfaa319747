//! A policy whose decisions somebody takes the time of. Which clock that is, is not known here.

use engine_model::runs::Seconds;
use ledger::Ledger;

use super::{Admission, Ahead, Ask, Dispatch, Fleet, Policy, StepRef};
use crate::trace::Step;

/// Is told when a policy begins to place a step and when it has.
pub trait Stopwatch {
    /// A step is being placed from now on.
    fn start(&self);
    /// It is.
    fn stop(&self);
}

/// A policy under a stopwatch; decides as it would without.
pub(crate) struct Watched<'a> {
    pub(crate) policy: Box<dyn Policy + 'a>,
    pub(crate) watch: &'a dyn Stopwatch,
}

impl Policy for Watched<'_> {
    fn admit(&mut self, ask: &Ask<'_>, fleet: &Fleet<'_>) -> Admission {
        self.policy.admit(ask, fleet)
    }

    fn place(&mut self, ask: &Ask<'_>, fleet: &Fleet<'_>) -> Dispatch {
        self.watch.start();
        let dispatch = self.policy.place(ask, fleet);
        self.watch.stop();
        dispatch
    }

    fn finished(&mut self, at: StepRef, step: &Step, now: Seconds) {
        self.policy.finished(at, step, now);
    }

    fn session_over(&mut self, session: usize) {
        self.policy.session_over(session);
    }

    fn unplanned(&self) -> usize {
        self.policy.unplanned()
    }

    fn ledger(&self) -> Option<&Ledger> {
        self.policy.ledger()
    }

    fn period(&self) -> Option<Seconds> {
        self.policy.period()
    }

    fn look_again(&mut self) -> Option<Seconds> {
        self.policy.look_again()
    }

    fn looks_ahead(&self) -> Option<Seconds> {
        self.policy.looks_ahead()
    }

    fn ahead(&mut self, most: usize, fleet: &Fleet<'_>) -> Vec<Ahead> {
        self.policy.ahead(most, fleet)
    }

    fn due(&mut self, fleet: &Fleet<'_>) -> Vec<StepRef> {
        self.policy.due(fleet)
    }
}
