//! ThunderAgent's scheduling of whole programs: a program is pinned to a worker as long as the contexts there fit, and
//! queues otherwise. Every five seconds some programs resume, and some that are in a tool call lose their place.

use std::collections::BTreeMap;

use engine_model::runs::Seconds;
use vocabulary::Tokens;

use super::{Dispatch, FleetView, PlacementRequest, RoutingPolicy, StepAdmission, StepRef};
use crate::trace::TraceStep;

/// Tokens reserved for each program's further output.
const BUFFER: Tokens = Tokens(100);
const RESCHEDULE_INTERVAL: Seconds = Seconds(5.0);

/// Programs by session.
#[derive(Default)]
pub(super) struct ThunderAgent {
    programs: BTreeMap<usize, Program>,
}

struct Program {
    context: Tokens,
    worker: Option<usize>,
    /// Start of the current tool call; none while the program waits or is served.
    tool_call_since: Option<Seconds>,
    waiting: Vec<StepRef>,
    steps: u64,
}

impl ThunderAgent {
    fn used(&self, worker: usize) -> Tokens {
        let assigned = self.programs.values().filter(|program| program.worker == Some(worker));
        assigned.map(|program| program.context + BUFFER).sum()
    }

    fn free_tokens(&self, fleet: &FleetView<'_>, worker: usize) -> Tokens {
        fleet.spec.sizes.device - self.used(worker)
    }

    /// Returns programs without a worker: those already served first, then new ones, then those in a tool call; short
    /// ones first.
    fn unplaced_programs(&self) -> Vec<(u8, Tokens, usize)> {
        let homeless = self.programs.iter().filter(|(_, program)| program.worker.is_none());
        let rank = |program: &Program| match (program.waiting.is_empty(), program.steps) {
            (true, _) => 2,
            (false, 0) => 1,
            (false, _) => 0,
        };
        let mut all: Vec<_> = homeless.map(|(session, program)| (rank(program), program.context, *session)).collect();
        all.sort_unstable();
        all
    }

    /// Resumes as many programs as fit in total, longest first, each at the worker with the most free memory.
    fn resume(&mut self, fleet: &FleetView<'_>) -> Vec<StepRef> {
        let mut free_tokens: Vec<Tokens> = fleet.all().map(|worker| self.free_tokens(fleet, worker)).collect();
        let all: Tokens = free_tokens.iter().filter(|room| **room > BUFFER).copied().sum();
        let (mut chosen, mut taken) = (Vec::new(), Tokens::ZERO);
        for (_, context, session) in self.unplaced_programs() {
            if taken + context + BUFFER <= all {
                chosen.push((context, session));
                taken += context + BUFFER;
            }
        }
        chosen.sort_unstable_by(|a, b| b.cmp(a));
        let mut resumed = Vec::new();
        for (context, session) in chosen {
            let worker = super::argmin(fleet.all(), |worker| std::cmp::Reverse(free_tokens[worker]));
            if free_tokens[worker] < context + BUFFER {
                continue;
            }
            free_tokens[worker] -= context + BUFFER;
            if let Some(program) = self.programs.get_mut(&session) {
                program.worker = Some(worker);
                resumed.append(&mut program.waiting);
            }
        }
        resumed
    }

    /// When contexts exceed a worker's memory, the shortest programs in a tool call lose their place.
    fn pause(&mut self, fleet: &FleetView<'_>) {
        for worker in fleet.all() {
            let (mut used, capacity) = (self.used(worker), fleet.spec.sizes.device);
            let acting = |program: &Program| program.worker == Some(worker) && program.tool_call_since.is_some();
            let mut victims: Vec<_> =
                self.programs.iter().filter(|(_, p)| acting(p)).map(|(session, p)| (p.context, *session)).collect();
            victims.sort_unstable();
            for (context, session) in victims {
                if used <= capacity {
                    break;
                }
                used -= context + BUFFER;
                if let Some(program) = self.programs.get_mut(&session) {
                    program.worker = None;
                }
            }
        }
    }
}

impl RoutingPolicy for ThunderAgent {
    fn admit(&mut self, request: &PlacementRequest<'_>, fleet: &FleetView<'_>) -> StepAdmission {
        let (session, context) = (request.at.session, request.step.prompt);
        let queue = self.programs.values().any(|program| !program.waiting.is_empty());
        let known = self.programs.contains_key(&session);
        let new_program = Program { context, worker: None, tool_call_since: None, waiting: Vec::new(), steps: 0 };
        let program = self.programs.entry(session).or_insert(new_program);
        (program.tool_call_since, program.context) = (None, context);
        if program.worker.is_some() {
            program.steps += 1;
            return StepAdmission::Now;
        }
        if !known && !queue {
            let fits = |worker: &usize| self.free_tokens(fleet, *worker) >= context + BUFFER;
            let free: Vec<usize> = fleet.all().filter(fits).collect();
            if !free.is_empty() {
                let home = super::argmin(free, |worker| self.used(worker));
                if let Some(program) = self.programs.get_mut(&session) {
                    program.worker = Some(home);
                    program.steps += 1;
                }
                return StepAdmission::Now;
            }
        }
        if let Some(program) = self.programs.get_mut(&session) {
            program.waiting.push(request.at);
        }
        StepAdmission::Later
    }

    fn place(&mut self, request: &PlacementRequest<'_>, _fleet: &FleetView<'_>) -> Dispatch {
        let home = self.programs.get(&request.at.session).and_then(|program| program.worker);
        Dispatch::at(home.unwrap_or_default())
    }

    fn step_finished(&mut self, at: StepRef, step: &TraceStep, now: Seconds) {
        if let Some(program) = self.programs.get_mut(&at.session) {
            (program.context, program.tool_call_since) = (step.prompt + step.answer, Some(now));
        }
    }

    fn session_finished(&mut self, session: usize) {
        self.programs.remove(&session);
    }

    fn poll_interval(&self) -> Option<Seconds> {
        Some(RESCHEDULE_INTERVAL)
    }

    fn due_steps(&mut self, fleet: &FleetView<'_>) -> Vec<StepRef> {
        let resumed = self.resume(fleet);
        self.pause(fleet);
        resumed
    }
}
