//! What is sent before a step asks for it, and whether the step then finds it.

use std::collections::HashMap;

use engine_model::runs::{Lent, RunId, Seconds};
use vocabulary::Tokens;

use super::{Event, World};
use crate::policies::{Ahead, StepRef};
use crate::report::SentAhead;
use crate::trace::Step;

/// So much is sent ahead at once.
const MOST_AT_ONCE: usize = 4;

#[derive(Default)]
pub(super) struct Aheads {
    under_way: HashMap<usize, Sending>,
    /// For whose next step something was sent, and where that is or will be.
    awaited: HashMap<(usize, u32), Awaited>,
    pub(super) figures: SentAhead,
}

struct Sending {
    from: usize,
    to: usize,
    for_whom: (usize, u32),
    runs: Vec<RunId>,
    /// What its source keeps until it has left.
    lent: Vec<RunId>,
}

struct Awaited {
    number: usize,
    to: usize,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    UnderWay,
    There,
    /// It found no room.
    Dropped,
}

impl Aheads {
    /// The next step goes to a worker.
    pub(super) fn dispatched(&mut self, (at, step): (StepRef, &Step), to: usize) {
        let Some(awaited) = self.awaited.remove(&(at.session, step.agent)) else { return };
        if awaited.state == State::UnderWay {
            self.figures.late += 1;
        } else if awaited.state == State::There && awaited.to == to {
            self.figures.used += 1;
        }
    }
}

impl World<'_> {
    /// Asks for what is to be sent, as long as there is something to come.
    pub(super) fn look_ahead(&mut self, period: Seconds) {
        let most = MOST_AT_ONCE.saturating_sub(self.links.ahead.under_way.len());
        if most > 0 {
            let moves = self.deal(|policy, fleet| policy.ahead(most, fleet));
            moves.into_iter().for_each(|chosen| self.send_ahead(chosen));
        }
        if !self.events.is_empty() {
            self.events.add(self.now + period, Event::AheadClock);
        }
    }

    fn send_ahead(&mut self, Ahead { after, path, from, to, until }: Ahead) {
        let runs = &self.trace.runs;
        let (source, target) = (&self.engines[from].engine, &self.engines[to].engine);
        let until = until.min(source.holds(runs, &path).with_disk);
        let wanted = path.iter().take_while(|run| runs.depth(**run) <= until);
        let wanted: Vec<_> = wanted.copied().filter(|run| !target.has(*run)).collect();
        if wanted.is_empty() {
            return;
        }
        let tokens: Tokens = wanted.iter().map(|run| runs.room(*run)).sum();
        let Lent { kept, loads } = self.engines[from].engine.lend(runs, &wanted);
        let arrives = self.links.send(self.now + Seconds(loads), (from, to), tokens);
        let for_whom = (after.session, self.trace.sessions[after.session].steps[after.step].agent);
        let number = self.links.ahead.figures.moves;
        self.links.ahead.figures.moves += 1;
        self.links.ahead.figures.tokens += tokens.0;
        self.links.ahead.awaited.insert(for_whom, Awaited { number, to, state: State::UnderWay });
        self.links.ahead.under_way.insert(number, Sending { from, to, for_whom, runs: wanted, lent: kept });
        self.events.add(arrives, Event::Brought(number));
    }

    pub(super) fn brought(&mut self, number: usize) {
        let Some(Sending { from, to, for_whom, runs: sent, lent }) = self.links.ahead.under_way.remove(&number) else {
            return;
        };
        let runs = &self.trace.runs;
        self.engines[from].engine.lent(runs, &lent);
        let state = if self.engines[to].engine.bring(runs, &sent) { State::There } else { State::Dropped };
        if let Some(awaited) = self.links.ahead.awaited.get_mut(&for_whom).filter(|awaited| awaited.number == number) {
            awaited.state = state;
        }
        self.wake(from);
        self.wake(to);
    }
}
