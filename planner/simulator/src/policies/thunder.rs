//! ThunderAgent's scheduling of whole programs: a program is pinned to a worker while the contexts of those there fit,
//! and waits for its turn otherwise. Every five seconds some go on and some that are in a tool call lose their place.

use std::collections::BTreeMap;

use engine_model::runs::Seconds;
use vocabulary::Tokens;

use super::{Admission, Ask, Dispatch, Fleet, Policy, StepRef};
use crate::trace::Step;

/// Room that each program is given for what it will still generate.
const BUFFER: Tokens = Tokens(100);
const PERIOD: Seconds = Seconds(5.0);

/// The programs, by session.
#[derive(Default)]
pub(super) struct Thunder {
    programs: BTreeMap<usize, Program>,
}

struct Program {
    context: Tokens,
    home: Option<usize>,
    /// Since when it is in a tool call; none while it waits or is served.
    acting: Option<Seconds>,
    waiting: Vec<StepRef>,
    steps: u64,
}

impl Thunder {
    fn used(&self, worker: usize) -> Tokens {
        let here = self.programs.values().filter(|program| program.home == Some(worker));
        here.map(|program| program.context + BUFFER).sum()
    }

    fn room(&self, fleet: &Fleet<'_>, worker: usize) -> Tokens {
        fleet.spec.sizes.device - self.used(worker)
    }

    /// Programs that wait for a place: served ones first, then new ones, then those in a tool call; short ones first.
    fn homeless(&self) -> Vec<(u8, Tokens, usize)> {
        let homeless = self.programs.iter().filter(|(_, program)| program.home.is_none());
        let rank = |program: &Program| match (program.waiting.is_empty(), program.steps) {
            (true, _) => 2,
            (false, 0) => 1,
            (false, _) => 0,
        };
        let mut all: Vec<_> = homeless.map(|(session, program)| (rank(program), program.context, *session)).collect();
        all.sort_unstable();
        all
    }

    /// As many as fit in all, and of these the longest first to where most room is.
    fn resume(&mut self, fleet: &Fleet<'_>) -> Vec<StepRef> {
        let mut rooms: Vec<Tokens> = fleet.all().map(|worker| self.room(fleet, worker)).collect();
        let all: Tokens = rooms.iter().filter(|room| **room > BUFFER).copied().sum();
        let (mut chosen, mut taken) = (Vec::new(), Tokens::ZERO);
        for (_, context, session) in self.homeless() {
            if taken + context + BUFFER <= all {
                chosen.push((context, session));
                taken += context + BUFFER;
            }
        }
        chosen.sort_unstable_by(|a, b| b.cmp(a));
        let mut due = Vec::new();
        for (context, session) in chosen {
            let worker = super::least(fleet.all(), |worker| std::cmp::Reverse(rooms[worker]));
            if rooms[worker] < context + BUFFER {
                continue;
            }
            rooms[worker] -= context + BUFFER;
            if let Some(program) = self.programs.get_mut(&session) {
                program.home = Some(worker);
                due.append(&mut program.waiting);
            }
        }
        due
    }

    /// Where contexts have grown beyond memory, the shortest programs in a tool call lose their place.
    fn pause(&mut self, fleet: &Fleet<'_>) {
        for worker in fleet.all() {
            let (mut used, capacity) = (self.used(worker), fleet.spec.sizes.device);
            let acting = |program: &Program| program.home == Some(worker) && program.acting.is_some();
            let mut victims: Vec<_> =
                self.programs.iter().filter(|(_, p)| acting(p)).map(|(session, p)| (p.context, *session)).collect();
            victims.sort_unstable();
            for (context, session) in victims {
                if used <= capacity {
                    break;
                }
                used -= context + BUFFER;
                if let Some(program) = self.programs.get_mut(&session) {
                    program.home = None;
                }
            }
        }
    }
}

impl Policy for Thunder {
    fn admit(&mut self, ask: &Ask<'_>, fleet: &Fleet<'_>) -> Admission {
        let (session, context) = (ask.at.session, ask.step.prompt);
        let queue = self.programs.values().any(|program| !program.waiting.is_empty());
        let known = self.programs.contains_key(&session);
        let fresh = Program { context, home: None, acting: None, waiting: Vec::new(), steps: 0 };
        let program = self.programs.entry(session).or_insert(fresh);
        (program.acting, program.context) = (None, context);
        if program.home.is_some() {
            program.steps += 1;
            return Admission::Now;
        }
        if !known && !queue {
            let fits = |worker: &usize| self.room(fleet, *worker) >= context + BUFFER;
            let free: Vec<usize> = fleet.all().filter(fits).collect();
            if !free.is_empty() {
                let home = super::least(free, |worker| self.used(worker));
                if let Some(program) = self.programs.get_mut(&session) {
                    program.home = Some(home);
                    program.steps += 1;
                }
                return Admission::Now;
            }
        }
        if let Some(program) = self.programs.get_mut(&session) {
            program.waiting.push(ask.at);
        }
        Admission::Later
    }

    fn place(&mut self, ask: &Ask<'_>, _fleet: &Fleet<'_>) -> Dispatch {
        let home = self.programs.get(&ask.at.session).and_then(|program| program.home);
        Dispatch::at(home.unwrap_or_default())
    }

    fn finished(&mut self, at: StepRef, step: &Step, now: Seconds) {
        if let Some(program) = self.programs.get_mut(&at.session) {
            (program.context, program.acting) = (step.prompt + step.answer, Some(now));
        }
    }

    fn session_over(&mut self, session: usize) {
        self.programs.remove(&session);
    }

    fn period(&self) -> Option<Seconds> {
        Some(PERIOD)
    }

    fn due(&mut self, fleet: &Fleet<'_>) -> Vec<StepRef> {
        let due = self.resume(fleet);
        self.pause(fleet);
        due
    }
}
