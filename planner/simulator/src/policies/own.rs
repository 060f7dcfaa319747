//! OwnerServe: the planner as routers run it, told what they would be told.
//!
//! Sessions, owners and sealed prefixes are the ledger's, told and read as routers do. The planner expects of every answer
//! what routers expect of one that its client does not limit: recordings tell no limits.

mod chains;
mod gaps;
mod quorum;

use std::collections::HashMap;

use engine_model::runs::{Memory, Seconds};
use ledger::Ledger;
use planner::{
    Account, Asking, Claim, Disabled, Handoff, Inputs, Plan, Queue, Stay, StepFacts, StepKind, Tenancy, Tiers,
    Transfers, Verdict, classify, plan,
};
use vocabulary::{
    Blocks, Bytes, Capacity, Carries, DpRank, Health, Incarnation, Knowledge, Link, Load, Micros, ModelId, Overlap,
    Owner, Role, SessionId, Speeds, Tier, Tokens, WorkerId, WorkerView,
};

use gaps::Gaps;
use quorum::{Asked, Located, Quorum};

use super::{Ablation, Admission as Admitted, Ahead, Ask, Dispatch, Fetch, Fleet, Foretold, Policy, StepRef, least};
use crate::trace::Step;

const MODEL: &str = "model";
/// How often steps that wait are looked at again.
const PERIOD: Seconds = Seconds(0.5);
/// How often sessions that are between two steps are looked at.
const AHEAD_PERIOD: Seconds = Seconds(0.5);

/// The planner, and what it is told between steps.
#[derive(Default)]
pub(super) struct Own {
    policy: planner::Policy,
    views: Vec<WorkerView>,
    /// The ledger, once the fleet is known.
    quorum: Option<Quorum>,
    under_way: HashMap<StepRef, UnderWay>,
    /// Whose KV lies where, as routers account for it.
    tenancy: Tenancy,
    /// Sessions between two steps, where something is sent ahead.
    gaps: Gaps,
    queue: Queue<StepRef>,
    /// Whether the world was asked to look at them.
    looks_again: bool,
    /// What is gone or wrong, in an ablation.
    ablation: Option<Ablation>,
    /// Steps without a plan.
    unplanned: usize,
}

/// A step that is being served.
struct UnderWay {
    located: Located,
    plan: Plan,
}

impl Own {
    /// The planner with a part of it gone, or told something wrong.
    pub(super) fn without(ablation: Ablation) -> Self {
        Self { ablation: Some(ablation), ..Self::default() }
    }

    fn answer(&self, session: SessionId, step: &Step) -> Tokens {
        match self.ablation {
            Some(Ablation::ToldLength) => step.answer,
            _ => self.tenancy.expected_answer(session),
        }
    }

    fn open(&mut self, fleet: &Fleet<'_>) {
        let timing = &fleet.spec.timing;
        if timing.pair > 0.0 {
            self.policy.attention_doubles_at = Tokens((timing.token / timing.pair) as u64);
        }
        self.policy.sources = fleet.spec.link.sources;
        let bytes = |tokens_per_second: f64| tokens_per_second * fleet.spec.kv_bytes as f64;
        self.policy.tiers = Tiers {
            host_tokens: fleet.spec.sizes.host,
            host_bytes_per_second: bytes(fleet.spec.sizes.host_tokens_per_second),
            disk_bytes_per_second: bytes(fleet.spec.sizes.disk_speed.read),
        };
        self.views = fleet.all().map(|worker| view(worker, fleet)).collect();
        self.quorum = Some(Quorum::new(fleet));
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
            let prefilling = u32::from(engine.is_prefilling());
            view.load = Load {
                running: answers as u32 + prefilling,
                waiting: engine.queued() as u32,
                // As routers count: a prompt counts whole until its first token. In tokens at the rate that the planner knows: the
                // work of long contexts counts as more of them.
                backlog: Tokens((engine.load().work.max(0.0) / timing.token) as u64),
                kv_usage: engine.memory_in_use().0 as f64 / fleet.spec.sizes.device.0.max(1) as f64,
            };
            let each = if answers > 0 { context as f64 / answers as f64 } else { prompt.0 as f64 };
            view.speeds.decode_slowdown = micros(timing.request + timing.context_token * each);
        }
    }

    /// What the ledger says of the prompt.
    fn locate(&mut self, ask: &Ask<'_>, fleet: &Fleet<'_>) -> (Located, StepKind) {
        let step = ask.step;
        // Requests on their own name no session: the ledger finds it by what they resend.
        let within = if ask.alone { ask.at.step as u128 } else { u128::from(step.agent) };
        let id = SessionId((ask.at.session as u128) << 32 | within);
        let named = (!ask.alone).then_some(id);
        let quorum = self.quorum.get_or_insert_with(|| Quorum::new(fleet));
        let asked = Asked { named, fresh: id, path: &step.path, prompt: step.prompt };
        let located = quorum.locate(&asked, micros(fleet.now.0));
        let deepest = ask.held.iter().map(|memory| memory.with_disk).max().unwrap_or_default();
        let facts = StepFacts {
            prompt: step.prompt,
            reused: deepest.max(located.shared.tokens(fleet.block)),
            relation: located.relation,
            idle: located.idle,
        };
        let kind = classify(&facts, &self.policy.thresholds);
        (located, kind)
    }

    /// Hands on what the planner is told of a step; also gives where the ledger places it.
    fn tell<T>(&mut self, ask: &Ask<'_>, fleet: &Fleet<'_>, then: impl FnOnce(&Inputs<'_>) -> T) -> (T, Located) {
        if self.views.is_empty() {
            self.open(fleet);
        }
        self.look(fleet, ask.step.prompt);
        let (located, step) = self.locate(ask, fleet);
        let overlaps = overlaps(ask, fleet.block);
        let asked = planner::Ask {
            model: MODEL.into(),
            adapter: None,
            prompt: ask.step.prompt,
            longest: None,
            answer: self.answer(located.session.id, ask.step),
            growth: self.tenancy.expected_growth(),
            block: fleet.block,
            transfers: Transfers::Allowed,
        };
        let told = then(&Inputs {
            step,
            ask: &asked,
            attention: fleet.attention,
            session: &located.session,
            workers: &self.views,
            shapes: &[],
            overlaps: &overlaps,
            account: Account { tenancy: &self.tenancy, now: micros(fleet.now.0) },
            excluded: &[],
            policy: &self.policy,
            disabled: Disabled::default(),
            turn: 0,
        });
        (told, located)
    }

    /// Notes who is served where from now on.
    fn begin(&mut self, ask: &Ask<'_>, fleet: &Fleet<'_>, (located, plan): (Located, Plan)) {
        let (id, server) = (located.session.id, place_of(plan.decode.worker));
        let now = micros(fleet.now.0);
        self.gaps.ends(ask.at.session, ask.step.agent);
        let before = located.session.owner.filter(|before| place_of(before.worker) != server);
        if let (Some(before), Claim::Move { .. } | Claim::Open) = (before, plan.claim) {
            self.tenancy.leaves(before, id);
        }
        let stay = Stay {
            tokens: ask.step.prompt + self.answer(id, ask.step),
            found: ask.held[server].device,
            capacity: fleet.spec.sizes.device,
        };
        self.tenancy.begins(owner(server), id, stay, now);
        self.tenancy.computes(owner(place_of(plan.prefill.worker)), plan.because.terms.compute, now);
        self.quorum.iter_mut().for_each(|quorum| quorum.announce(&located, owner(server)));
        self.under_way.insert(ask.at, UnderWay { located, plan });
    }
}

impl Policy for Own {
    fn admit(&mut self, ask: &Ask<'_>, fleet: &Fleet<'_>) -> Admitted {
        if self.ablation == Some(Ablation::NoAdmission) {
            return Admitted::Now;
        }
        let mut queue = std::mem::take(&mut self.queue);
        let (verdict, _) = self.tell(ask, fleet, |inputs| {
            plan(inputs).ok().map(|decision| queue.admit(ask.at, Asking::of(inputs, &decision)))
        });
        self.queue = queue;
        match verdict {
            Some(Verdict::Hold { .. }) => Admitted::Later,
            Some(Verdict::Start { .. }) | None => Admitted::Now,
        }
    }

    fn place(&mut self, ask: &Ask<'_>, fleet: &Fleet<'_>) -> Dispatch {
        let (decision, located) = self.tell(ask, fleet, plan);
        // Every worker is ready and long enough, so that there is a plan; one without is counted, and anybody would do.
        let Ok(decision) = decision else {
            self.unplanned += 1;
            return Dispatch::at(least(fleet.all(), |worker| fleet.requests(worker)));
        };
        let chosen = decision.plan;
        let (prefill, decode) = (place_of(chosen.prefill.worker), place_of(chosen.decode.worker));
        self.begin(ask, fleet, (located, chosen));
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
        let Some(UnderWay { located, plan }) = self.under_way.remove(&at) else { return };
        let (server, now) = (owner(place_of(plan.decode.worker)), micros(now.0));
        self.tenancy.ends(server, located.session.id, step.prompt + step.answer, now);
        self.tenancy.served(located.session.id, step.prompt + step.answer);
        self.tenancy.answered(located.session.id, step.answer);
        self.quorum.iter_mut().for_each(|quorum| quorum.commit(&located, &plan, now));
        if self.looks_ahead().is_some() && located.is_named {
            self.gaps.begins(at, step);
        }
    }

    fn session_over(&mut self, session: usize) {
        self.gaps.session_over(session);
    }

    fn looks_ahead(&self) -> Option<Seconds> {
        (self.ablation == Some(Ablation::Ahead)).then_some(AHEAD_PERIOD)
    }

    fn ahead(&mut self, most: usize, fleet: &Fleet<'_>) -> Vec<Ahead> {
        let moves = self.worth_moving(fleet);
        moves.into_iter().take(most).map(|(waiting, chosen)| self.send_ahead(fleet, (waiting, chosen))).collect()
    }

    fn ledger(&self) -> Option<&Ledger> {
        self.quorum.as_ref().map(Quorum::ledger)
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
        link: Some(Link {
            fabric: "fabric".into(),
            fixed: micros(spec.link.fixed),
            bytes_per_second,
            carries: Carries::Prefixes,
        }),
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
    fn the_planner_expects_what_it_learnt_unless_it_is_told() {
        let (trace, session) = (sessions(), SessionId(1));
        let learnt = |mut own: Own| {
            own.tenancy.answered(session, Tokens(9_000));
            own
        };
        let (own, told) = (learnt(Own::default()), learnt(Own::without(Ablation::ToldLength)));
        let expected = own.tenancy.expected_answer(session);
        assert!(expected > Own::default().tenancy.expected_answer(session));
        assert!(trace.steps().all(|step| own.answer(session, step) == expected));
        assert!(trace.steps().all(|step| told.answer(session, step) == step.answer));
    }
}
