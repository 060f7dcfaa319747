//! Sessions between two steps: what of them is worth sending ahead of the next one.
//!
//! What is sent is a copy, whatever becomes of ownership: the next step's commit moves that, as it always does.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use engine_model::runs::Memory;
use planner::{AheadBounds, AheadMove, Stay};
use vocabulary::SessionId;

use super::{Ahead, Ask, Fleet, Own, StepRef, micros, owner, place_of};
use crate::trace::Step;

/// Agents of sessions whose next step is awaited.
#[derive(Default)]
pub(super) struct Gaps(BTreeMap<(usize, u32), Waiting>);

#[derive(Clone)]
pub(super) struct Waiting {
    after: StepRef,
    /// The next step as far as it is known: the last one's prompt with its answer. Of the answer only the length counts.
    expected: Step,
    is_sent: bool,
}

impl Gaps {
    pub(super) fn begins(&mut self, after: StepRef, step: &Step) {
        let expected = Step { prompt: step.prompt + step.answer, ..step.clone() };
        self.0.insert((after.session, step.agent), Waiting { after, expected, is_sent: false });
    }

    /// The next one is on its way.
    pub(super) fn ends(&mut self, session: usize, agent: u32) {
        self.0.remove(&(session, agent));
    }

    pub(super) fn session_over(&mut self, session: usize) {
        self.0.retain(|(own, _), _| *own != session);
    }
}

impl Own {
    /// What pays, the most first. Nothing is sent twice in a gap.
    pub(super) fn worth_moving(&mut self, fleet: &Fleet<'_>) -> Vec<((Waiting, SessionId), AheadMove)> {
        let waiting: Vec<_> = self.gaps.0.values().filter(|waiting| !waiting.is_sent).cloned().collect();
        let bounds = AheadBounds::default();
        let mut moves = Vec::new();
        for waiting in waiting {
            let held = held(&waiting.expected, fleet);
            let ask = Ask { at: waiting.after, step: &waiting.expected, alone: false, held: &held };
            let (chosen, located) = self.tell(&ask, fleet, |inputs| planner::ahead(inputs, &bounds));
            moves.extend(chosen.ok().map(|chosen| ((waiting, located.session.id), chosen)));
        }
        moves.sort_by_key(|((waiting, _), chosen)| (Reverse(chosen.saves - chosen.costs), waiting.after));
        moves
    }

    /// Notes that it is on its way.
    pub(super) fn send_ahead(
        &mut self,
        fleet: &Fleet<'_>,
        ((waiting, id), chosen): ((Waiting, SessionId), AheadMove),
    ) -> Ahead {
        let Waiting { after, expected, .. } = waiting;
        if let Some(noted) = self.gaps.0.get_mut(&(after.session, expected.agent)) {
            noted.is_sent = true;
        }
        let (from, to) = (place_of(chosen.from), place_of(chosen.to));
        let until = chosen.blocks.tokens(fleet.block);
        let found = fleet.workers[to].holds(fleet.runs, &expected.path).device;
        let stay = Stay { tokens: until, found, capacity: fleet.spec.sizes.device };
        self.tenancy.copied(owner(to), id, stay, micros(fleet.now.0));
        Ahead { after, path: expected.path, from, to, until }
    }
}

fn held(step: &Step, fleet: &Fleet<'_>) -> Vec<Memory> {
    fleet.workers.iter().map(|engine| engine.holds(fleet.runs, &step.path)).collect()
}
