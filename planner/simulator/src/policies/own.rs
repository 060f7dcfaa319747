//! OwnerServe: the planner as routers run it, told what they would be told.
//!
//! Ownership is kept here as the ledger keeps it: a session's owner moves when a step that moved it is over, and what
//! finished steps have computed is sealed. The planner expects of every answer what routers expect of one that its client
//! does not limit.

use std::collections::HashMap;
use std::sync::Arc;

use engine_model::runs::{Memory, RunId, Seconds};
use planner::{
    Account, Actions, Asking, Claim, Handoff, HeadRelation, Inputs, Plan, Queue, SessionView, Sources, Stay, StepFacts,
    StepKind, Tenancy, TierSpeeds, Transfers, Verdict, classify, plan,
};
use vocabulary::{
    Blocks, Bytes, Capacity, DpRank, Epoch, Health, Incarnation, Knowledge, Link, Load, Micros, ModelId, Overlap,
    Owner, Role, SessionId, Speeds, Tier, Tokens, WorkerId, WorkerView,
};

use super::{Ablation, Admission as Admitted, Ask, Dispatch, Fetch, Fleet, Foretold, Policy, StepRef, least};
use crate::trace::Step;

const MODEL: &str = "model";
/// How often steps that wait are looked at again.
const PERIOD: Seconds = Seconds(0.5);
/// What routers expect of an answer that its client does not limit; recordings tell no limits.
pub const USUAL_ANSWER: Tokens = Tokens(256);

/// The planner, and what it is told between steps.
#[derive(Default)]
pub(super) struct Own {
    policy: planner::Policy,
    views: Vec<WorkerView>,
    /// Sealed runs.
    sealed: Vec<bool>,
    heads: HashMap<(usize, u32), Head>,
    under_way: HashMap<StepRef, UnderWay>,
    /// Whose KV lies where, as routers account for it.
    tenancy: Tenancy,
    /// Steps that wait.
    queue: Queue<StepRef>,
    /// Whether the world was asked to look at them.
    looks_again: bool,
    moves: u64,
    /// What is gone or wrong, in an ablation.
    ablation: Option<Ablation>,
    /// Steps without a plan.
    unplanned: usize,
}

/// A step that is being served.
struct UnderWay {
    session: SessionId,
    /// Who answers.
    server: usize,
    /// Who owns its session afterwards.
    owner: usize,
}

/// Where a conversation stands: the main one of a session, or a sub-agent's.
struct Head {
    owner: usize,
    epoch: Epoch,
    path: Arc<[RunId]>,
    since: Seconds,
}

impl Own {
    /// The planner with a part of it gone, or told something wrong.
    pub(super) fn without(ablation: Ablation) -> Self {
        Self { ablation: Some(ablation), ..Self::default() }
    }

    fn answer(&self, step: &Step) -> Tokens {
        match self.ablation {
            Some(Ablation::ToldLength) => step.answer,
            _ => USUAL_ANSWER,
        }
    }

    fn open(&mut self, fleet: &Fleet<'_>) {
        let timing = &fleet.spec.timing;
        if timing.pair > 0.0 {
            self.policy.attention_doubles_at = Tokens((timing.token / timing.pair) as u64);
        }
        // Links carry KV past the engines' queues.
        self.policy.sources = Sources::AtOnce;
        let bytes = |tokens_per_second: f64| tokens_per_second * fleet.spec.kv_bytes as f64;
        self.policy.tiers = TierSpeeds {
            host_bytes_per_second: bytes(fleet.spec.sizes.host_tokens_per_second),
            disk_bytes_per_second: bytes(fleet.spec.sizes.disk_speed.read),
        };
        self.views = fleet.all().map(|worker| view(worker, fleet)).collect();
        self.sealed = vec![false; fleet.runs.len()];
        let Some(ablation) = self.ablation else { return };
        self.policy.disabled = ablation.disabled().to_vec();
        if ablation == Ablation::NoEvictionPrice {
            self.policy.eviction = 0.0;
        }
        self.views.iter_mut().enumerate().for_each(|(place, view)| ablation.mislead(place, view));
    }

    fn look(&mut self, fleet: &Fleet<'_>, prompt: Tokens) {
        for (view, engine) in self.views.iter_mut().zip(fleet.workers) {
            let (answers, context) = engine.batch();
            let timing = &fleet.spec.timing;
            let left = engine.load().work - engine.done().unwrap_or_default();
            let prefilling = u32::from(engine.done().is_some());
            view.load = Load {
                running: answers as u32 + prefilling,
                waiting: engine.queued() as u32,
                // In tokens at the rate that the planner knows: the work of long contexts counts as more of them.
                backlog: Tokens((left.max(0.0) / timing.token) as u64),
                kv_usage: engine.memory_in_use().0 as f64 / fleet.spec.sizes.device.0.max(1) as f64,
            };
            let each = if answers > 0 { context as f64 / answers as f64 } else { prompt.0 as f64 };
            view.speeds.decode_slowdown = micros(timing.request + timing.context_token * each);
        }
    }

    /// What the ledger would say of the prompt.
    fn session(&self, ask: &Ask<'_>, fleet: &Fleet<'_>) -> (SessionView, StepKind) {
        let (step, block) = (ask.step, fleet.block);
        // Requests on their own are conversations of one step each: ties must not send all of them to one worker.
        let within = if ask.alone { ask.at.step as u128 } else { u128::from(step.agent) };
        let id = SessionId((ask.at.session as u128) << 32 | within);
        let known = step.path.iter().take_while(|run| self.sealed[run.0 as usize]).count();
        let sealed = fleet.runs.end(&step.path[..known]).whole_blocks(block);
        let mut session = SessionView { sealed, ..SessionView::new(id) };
        let deepest = ask.held.iter().map(|memory| memory.with_disk).max().unwrap_or_default();
        let mut facts = StepFacts { prompt: step.prompt, reused: deepest, ..StepFacts::default() };
        let head = self.heads.get(&(ask.at.session, step.agent)).filter(|_| !ask.alone);
        if let Some(head) = head {
            (session.owner, session.epoch) = (Some(owner(head.owner)), head.epoch);
            let shared = head.path.iter().zip(step.path.iter()).take_while(|(a, b)| a == b).count();
            let blocks = |path: &[RunId]| fleet.runs.end(path).whole_blocks(block);
            facts.reused = deepest.max(fleet.runs.end(&step.path[..shared]));
            facts.relation =
                HeadRelation::of(step.prompt.whole_blocks(block), blocks(&head.path), blocks(&step.path[..shared]));
            facts.idle = Some(micros((fleet.now - head.since).0));
        }
        (session, classify(&facts, &self.policy.thresholds))
    }

    /// Hands on what the planner is told of a step.
    fn tell<T>(&mut self, ask: &Ask<'_>, fleet: &Fleet<'_>, then: impl FnOnce(&Inputs<'_>) -> T) -> T {
        if self.views.is_empty() {
            self.open(fleet);
        }
        self.look(fleet, ask.step.prompt);
        let (session, step) = self.session(ask, fleet);
        let overlaps = overlaps(ask, fleet.block);
        let asked = planner::Ask {
            model: MODEL.into(),
            adapter: None,
            prompt: ask.step.prompt,
            longest: None,
            answer: self.answer(ask.step),
            block: fleet.block,
            transfers: Transfers::Allowed,
        };
        then(&Inputs {
            step,
            ask: &asked,
            attention: fleet.attention,
            session: &session,
            workers: &self.views,
            shapes: &[],
            overlaps: &overlaps,
            account: Account { tenancy: &self.tenancy, now: micros(fleet.now.0) },
            excluded: &[],
            policy: &self.policy,
            disabled: Actions::NONE,
            turn: 0,
        })
    }

    /// Notes who is served where from now on.
    fn begin(&mut self, ask: &Ask<'_>, fleet: &Fleet<'_>, (session, plan): (&SessionView, &Plan)) {
        let server = place_of(plan.decode.worker);
        let before = session.owner.map(|owner| place_of(owner.worker));
        let moves = matches!(plan.claim, Claim::Move { .. } | Claim::Open);
        if let Some(before) = before.filter(|before| moves && *before != server) {
            self.tenancy.leaves(owner(before), session.id);
        }
        let stay = Stay {
            tokens: ask.step.prompt + self.answer(ask.step),
            found: ask.held[server].device,
            capacity: fleet.spec.sizes.device,
        };
        self.tenancy.begins(owner(server), session.id, stay, micros(fleet.now.0));
        let owner = before.filter(|_| !moves).unwrap_or(server);
        self.under_way.insert(ask.at, UnderWay { session: session.id, server, owner });
    }
}

impl Policy for Own {
    fn admit(&mut self, ask: &Ask<'_>, fleet: &Fleet<'_>) -> Admitted {
        if self.ablation == Some(Ablation::NoAdmission) {
            return Admitted::Now;
        }
        let mut queue = std::mem::take(&mut self.queue);
        let verdict = self.tell(ask, fleet, |inputs| {
            plan(inputs).ok().map(|decision| queue.admit(ask.at, Asking::of(inputs, &decision)))
        });
        self.queue = queue;
        match verdict {
            Some(Verdict::Hold { .. }) => Admitted::Later,
            Some(Verdict::Start { .. }) | None => Admitted::Now,
        }
    }

    fn place(&mut self, ask: &Ask<'_>, fleet: &Fleet<'_>) -> Dispatch {
        let (decision, session) = self.tell(ask, fleet, |inputs| (plan(inputs), inputs.session.clone()));
        // Every worker is ready and long enough, so that there is a plan; one without is counted, and anybody would do.
        let Ok(decision) = decision else {
            self.unplanned += 1;
            return Dispatch::at(least(fleet.all(), |worker| fleet.requests(worker)));
        };
        let chosen = decision.plan;
        let (prefill, decode) = (place_of(chosen.prefill.worker), place_of(chosen.decode.worker));
        self.begin(ask, fleet, (&session, &chosen));
        let fetch = match chosen.handoff {
            Some(Handoff::Replicate { from, blocks, .. }) => {
                Some(Fetch { from: place_of(from), until: blocks.tokens(fleet.block) })
            }
            _ => None,
        };
        let first_token = Seconds(chosen.because.terms.first_token().0 as f64 / 1e6);
        let foretold = Some(Foretold { action: chosen.action, first_token });
        Dispatch { prefill, decode, fetch, foretold, ..Dispatch::at(decode) }
    }

    fn finished(&mut self, at: StepRef, step: &Step, now: Seconds) {
        let Some(UnderWay { session, server, owner }) = self.under_way.remove(&at) else { return };
        self.tenancy.ends(self::owner(server), session, step.prompt + step.answer, micros(now.0));
        let path = step.resent.as_ref().unwrap_or(&step.path).clone();
        path.iter().for_each(|run| self.sealed[run.0 as usize] = true);
        let before = self.heads.get(&(at.session, step.agent));
        let epoch = before.filter(|head| head.owner == owner).map(|head| head.epoch).unwrap_or_else(|| {
            self.moves += 1;
            Epoch { generation: 0, index: self.moves, position: 0 }
        });
        self.heads.insert((at.session, step.agent), Head { owner, epoch, path, since: now });
    }

    fn unplanned(&self) -> usize {
        self.unplanned
    }

    fn look_again(&mut self) -> Option<Seconds> {
        (!self.queue.is_empty() && !std::mem::replace(&mut self.looks_again, true)).then_some(PERIOD)
    }

    fn due(&mut self, _fleet: &Fleet<'_>) -> Vec<StepRef> {
        self.looks_again = false;
        self.queue.in_turn()
    }

    fn session_over(&mut self, session: usize) {
        self.heads.retain(|(of, _), _| *of != session);
    }
}

fn overlaps(ask: &Ask<'_>, block: Tokens) -> Vec<Overlap> {
    let mut all = Vec::with_capacity(ask.held.len());
    for (worker, memory) in ask.held.iter().enumerate() {
        let mut deepest = Blocks::ZERO;
        let Memory { device, with_host, with_disk } = *memory;
        let tiers = [(Tier::Hbm, device), (Tier::Host, with_host), (Tier::Disk, with_disk)];
        for (tier, depth) in tiers {
            let blocks = depth.whole_blocks(block);
            if blocks > deepest {
                deepest = blocks;
                all.push(Overlap { worker: id(worker), rank: DpRank(0), tier, blocks });
            }
        }
    }
    all
}

fn view(worker: usize, fleet: &Fleet<'_>) -> WorkerView {
    let spec = fleet.spec;
    let bytes_per_second = spec.link.tokens_per_second * spec.kv_bytes as f64;
    WorkerView {
        id: id(worker),
        endpoint: format!("worker-{worker}").into(),
        incarnation: Incarnation(1),
        role: Role::Hybrid,
        models: [ModelId::from(MODEL)].into(),
        ranks: 1,
        health: Health::Ready,
        knowledge: Knowledge::Exact,
        load: Load::default(),
        capacity: Capacity { kv: spec.sizes.device, block: fleet.block, context: Tokens::ZERO },
        speeds: Speeds {
            prefill_tokens_per_second: 1.0 / spec.timing.token,
            decode_step: micros(spec.timing.step),
            decode_slowdown: Micros::ZERO,
        },
        kv_bytes_per_token: Bytes(spec.kv_bytes),
        link: Some(Link { fabric: "fabric".into(), fixed: micros(spec.link.fixed), bytes_per_second }),
    }
}

fn id(worker: usize) -> WorkerId {
    WorkerId(worker as u64)
}

fn place_of(worker: WorkerId) -> usize {
    worker.0 as usize
}

fn owner(worker: usize) -> Owner {
    Owner { worker: id(worker), incarnation: Incarnation(1), rank: DpRank(0) }
}

fn micros(seconds: f64) -> Micros {
    Micros((seconds * 1e6).max(0.0) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::sessions;

    #[test]
    fn the_planner_expects_what_routers_expect_unless_it_is_told() {
        let trace = sessions();
        assert!(trace.steps().any(|step| step.answer != USUAL_ANSWER));
        assert!(trace.steps().all(|step| Own::default().answer(step) == USUAL_ANSWER));
        assert!(trace.steps().all(|step| Own::without(Ablation::ToldLength).answer(step) == step.answer));
    }
}
