//! OwnerServe: the planner with the same inputs that routers give it.
//!
//! Sessions, owners and sealed prefixes are kept in the real ledger, written and read as routers do. The planner
//! expects of every answer what routers expect when the client sets no limit: recordings contain no limits.

mod run_prefix_ids;
mod virtual_ledger;

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};

use engine_model::runs::{PromptTierDepths, Seconds};
use ledger::Ledger;
use planner::{
    AdmissionDecision, AdmissionRequest, ChosenReplication, ClassificationInputs, DisabledFeatures, HandoffKind,
    LowerTiers, OccupancyModel, OccupancyView, OwnershipEffect, Plan, PlanningInputs, ReplicationLimits, StepFootprint,
    StepKind, StepQueue, TransferPermission, classify, plan,
};
use vocabulary::{
    Blocks, Bytes, DpRank, EngineSpeed, Incarnation, KvIndexState, KvLink, KvLinkCapability, Micros, ModelId, Overlap,
    Owner, SessionId, Tier, Tokens, WorkerCapacity, WorkerHealth, WorkerId, WorkerLoad, WorkerRole, WorkerView,
};

use super::{
    Ablation, Dispatch, FetchOrder, FleetView, PlacementPrediction, PlacementRequest, ReplicationOrder, RoutingPolicy,
    StepAdmission as Admitted, StepRef, argmin,
};
use crate::trace::TraceStep;
use virtual_ledger::{PromptMatch, PromptQuery, VirtualLedger};

const MODEL: &str = "model";
/// Interval between checks of the queued steps.
const QUEUE_POLL_DELAY: Seconds = Seconds(0.5);
/// Interval between checks of the idle sessions.
const REPLICATION_INTERVAL: Seconds = Seconds(0.5);

/// The planner, and its state between steps.
#[derive(Default)]
pub(super) struct OwnerServe {
    policy: planner::Policy,
    views: Vec<WorkerView>,
    /// Ledger; created once the fleet is known.
    ledger: Option<VirtualLedger>,
    in_flight: HashMap<StepRef, InFlightStep>,
    /// KV occupancy model, kept as routers keep it.
    occupancy: OccupancyModel,
    /// Idle sessions, when prefixes are replicated ahead.
    idle_agents: IdleAgents,
    queue: StepQueue<StepRef>,
    /// Whether a check of the queued steps is scheduled.
    is_poll_scheduled: bool,
    /// Part that is removed or wrong, in an ablation.
    ablation: Option<Ablation>,
    /// Number of steps without a plan.
    fallback_steps: usize,
}

/// A step being served.
struct InFlightStep {
    prompt_match: PromptMatch,
    plan: Plan,
}

impl OwnerServe {
    /// Returns OwnerServe with one part removed or wrong.
    pub(super) fn without(ablation: Ablation) -> Self {
        Self { ablation: Some(ablation), ..Self::default() }
    }

    fn expected_answer(&self, session: SessionId, step: &TraceStep) -> Tokens {
        match self.ablation {
            Some(Ablation::KnownOutputLength) => step.answer,
            _ => self.occupancy.expected_answer(session),
        }
    }

    fn init_fleet(&mut self, fleet: &FleetView<'_>) {
        let timing = &fleet.spec.timing;
        if timing.attention_pair > 0.0 {
            self.policy.attention_cost_doubling_tokens = Tokens((timing.prefill_token / timing.attention_pair) as u64);
        }
        self.policy.replicate_dispatch = fleet.spec.link.sources;
        let bytes = |tokens_per_second: f64| tokens_per_second * fleet.spec.kv_bytes as f64;
        self.policy.tiers = LowerTiers {
            host_tokens: fleet.spec.sizes.host,
            host_bandwidth: bytes(fleet.spec.sizes.host_tokens_per_second),
            disk_bandwidth: bytes(fleet.spec.sizes.disk_speed.read),
        };
        self.views = fleet.all().map(|worker| view(worker, fleet)).collect();
        self.ledger = Some(VirtualLedger::new(fleet));
        let Some(ablation) = self.ablation else { return };
        self.policy.disabled_actions = ablation.disabled().to_vec();
        if ablation == Ablation::NoEvictionCost {
            self.policy.eviction_weight = 0.0;
        }
        self.views.iter_mut().enumerate().for_each(|(place, view)| ablation.falsify_speed(place, view));
    }

    fn refresh_loads(&mut self, fleet: &FleetView<'_>, prompt: Tokens) {
        for (view, engine) in self.views.iter_mut().zip(fleet.workers) {
            let (answers, context) = engine.batch();
            let timing = &fleet.spec.timing;
            let prefilling = u32::from(engine.is_prefilling());
            view.load = WorkerLoad {
                running: answers as u32 + prefilling,
                waiting: engine.queued() as u32,
                // As in routers: a prompt counts in full until its first token. The work is converted to tokens at the
                // prefill rate that the planner knows, so the work of long contexts counts as more tokens.
                backlog: Tokens((engine.load().work.max(0.0) / timing.prefill_token) as u64),
                kv_usage: engine.memory_in_use().0 as f64 / fleet.spec.sizes.device.0.max(1) as f64,
            };
            let each = if answers > 0 { context as f64 / answers as f64 } else { prompt.0 as f64 };
            view.speeds.decode_slowdown = micros(timing.decode_request + timing.context_token * each);
        }
    }

    /// Looks the prompt up in the ledger.
    fn locate(&mut self, request: &PlacementRequest<'_>, fleet: &FleetView<'_>) -> (PromptMatch, StepKind) {
        let step = request.step;
        // Independent requests name no session: the ledger finds it by the prefix that they resend.
        let within = if request.is_independent { request.at.step as u128 } else { u128::from(step.agent) };
        let id = SessionId((request.at.session as u128) << 32 | within);
        let named = (!request.is_independent).then_some(id);
        let quorum = self.ledger.get_or_insert_with(|| VirtualLedger::new(fleet));
        let query = PromptQuery { client_session: named, new_session: id, path: &step.path, prompt: step.prompt };
        let located = quorum.locate(&query, micros(fleet.now.0));
        let deepest = request.memory_by_worker.iter().map(|memory| memory.with_disk).max().unwrap_or_default();
        let facts = ClassificationInputs {
            prompt_tokens: step.prompt,
            reused_tokens: deepest.max(located.shared.tokens(fleet.block)),
            relation: located.relation,
            idle: located.idle,
        };
        let kind = classify(&facts, &self.policy.thresholds);
        (located, kind)
    }

    /// Passes the planning inputs of a step to `then`; also returns the ledger's match.
    fn with_inputs<T>(
        &mut self,
        request: &PlacementRequest<'_>,
        fleet: &FleetView<'_>,
        then: impl FnOnce(&PlanningInputs<'_>) -> T,
    ) -> (T, PromptMatch) {
        if self.views.is_empty() {
            self.init_fleet(fleet);
        }
        self.refresh_loads(fleet, request.step.prompt);
        let (located, step) = self.locate(request, fleet);
        let overlaps = overlaps(request, fleet.block);
        let profile = planner::RequestProfile {
            model: MODEL.into(),
            adapter: None,
            prompt_tokens: request.step.prompt,
            longest_prompt_tokens: None,
            expected_output_tokens: self.expected_answer(located.session.id, request.step),
            expected_growth_tokens: self.occupancy.expected_growth(),
            block_size: fleet.block,
            transfers: TransferPermission::Allowed,
        };
        let result = then(&PlanningInputs {
            step,
            request: &profile,
            attention: fleet.attention,
            session: &located.session,
            workers: &self.views,
            shapes: &[],
            overlaps: &overlaps,
            occupancy: OccupancyView { model: &self.occupancy, now: micros(fleet.now.0) },
            excluded: &[],
            policy: &self.policy,
            disabled: DisabledFeatures::default(),
            round_robin_index: 0,
        });
        (result, located)
    }

    /// Records which worker serves the step.
    fn record_dispatch(
        &mut self,
        request: &PlacementRequest<'_>,
        fleet: &FleetView<'_>,
        (located, plan): (PromptMatch, Plan),
    ) {
        let (id, worker) = (located.session.id, worker_index(plan.target()));
        let now = micros(fleet.now.0);
        self.idle_agents.remove(request.at.session, request.step.agent);
        let before = located.session.owner.filter(|before| worker_index(before.worker) != worker);
        if let (Some(before), OwnershipEffect::Move { .. } | OwnershipEffect::Claim) = (before, plan.ownership) {
            self.occupancy.session_moved(before, id);
        }
        let footprint = StepFootprint {
            tokens: request.step.prompt + self.expected_answer(id, request.step),
            cached: request.memory_by_worker[worker].device,
            capacity: fleet.spec.sizes.device,
        };
        self.occupancy.step_started(owner(worker), id, footprint, now);
        self.occupancy.prefill_started(
            owner(worker_index(plan.prompt_leg().worker)),
            plan.rationale.cost_terms.compute,
            now,
        );
        self.ledger.iter_mut().for_each(|quorum| quorum.announce(&located, owner(worker)));
        self.in_flight.insert(request.at, InFlightStep { prompt_match: located, plan });
    }
}

impl RoutingPolicy for OwnerServe {
    fn admit(&mut self, request: &PlacementRequest<'_>, fleet: &FleetView<'_>) -> Admitted {
        if self.ablation == Some(Ablation::NoAdmission) {
            return Admitted::Now;
        }
        let mut queue = std::mem::take(&mut self.queue);
        let (verdict, _) = self.with_inputs(request, fleet, |inputs| {
            plan(inputs).ok().map(|decision| queue.admit(request.at, AdmissionRequest::of(inputs, &decision)))
        });
        self.queue = queue;
        match verdict {
            Some(AdmissionDecision::Hold { .. }) => Admitted::Later,
            Some(AdmissionDecision::Start { .. }) | None => Admitted::Now,
        }
    }

    fn place(&mut self, request: &PlacementRequest<'_>, fleet: &FleetView<'_>) -> Dispatch {
        let (decision, located) = self.with_inputs(request, fleet, plan);
        // Every worker is ready and large enough, so there is always a plan; a step without one is counted and placed
        // anywhere.
        let Ok(decision) = decision else {
            self.fallback_steps += 1;
            return Dispatch::at(argmin(fleet.all(), |worker| fleet.requests(worker)));
        };
        let chosen = decision.plan;
        let (prefill, decode) = (worker_index(chosen.prompt_leg().worker), worker_index(chosen.target()));
        self.record_dispatch(request, fleet, (located, chosen));
        let fetch = chosen.sequence.handoff(HandoffKind::Replicate).and_then(|handoff| {
            let until = handoff.blocks?.tokens(fleet.block);
            Some(FetchOrder { from: worker_index(handoff.source.worker), until })
        });
        let ttft = Seconds(chosen.rationale.cost_terms.time_to_first_token().0 as f64 / 1e6);
        let prediction = Some(PlacementPrediction { action: chosen.action, ttft });
        Dispatch { prefill, decode, fetch, prediction, ..Dispatch::at(decode) }
    }

    fn step_finished(&mut self, at: StepRef, step: &TraceStep, now: Seconds) {
        let Some(InFlightStep { prompt_match: located, plan }) = self.in_flight.remove(&at) else { return };
        let (owner, now) = (owner(worker_index(plan.target())), micros(now.0));
        self.occupancy.step_ended(owner, located.session.id, step.prompt + step.answer, now);
        self.occupancy.step_served(located.session.id, step.prompt + step.answer);
        self.occupancy.answer_completed(located.session.id, step.answer);
        self.ledger.iter_mut().for_each(|quorum| quorum.commit(&located, &plan, now));
        if self.replication_interval().is_some() && located.is_named {
            self.idle_agents.insert(at, step);
        }
    }

    fn session_finished(&mut self, session: usize) {
        self.idle_agents.session_finished(session);
    }

    fn replication_interval(&self) -> Option<Seconds> {
        (self.ablation == Some(Ablation::PrefixReplication)).then_some(REPLICATION_INTERVAL)
    }

    fn replications(&mut self, most: usize, fleet: &FleetView<'_>) -> Vec<ReplicationOrder> {
        let moves = self.worthwhile_replications(fleet);
        moves
            .into_iter()
            .take(most)
            .map(|(waiting, chosen)| self.record_replication(fleet, (waiting, chosen)))
            .collect()
    }

    fn ledger(&self) -> Option<&Ledger> {
        self.ledger.as_ref().map(VirtualLedger::ledger)
    }

    fn fallback_steps(&self) -> usize {
        self.fallback_steps
    }

    fn poll_after(&mut self) -> Option<Seconds> {
        (!self.queue.is_empty() && !std::mem::replace(&mut self.is_poll_scheduled, true)).then_some(QUEUE_POLL_DELAY)
    }

    fn due_steps(&mut self, _fleet: &FleetView<'_>) -> Vec<StepRef> {
        self.is_poll_scheduled = false;
        self.queue.admission_order()
    }
}

fn overlaps(request: &PlacementRequest<'_>, block: Tokens) -> Vec<Overlap> {
    let mut all = Vec::with_capacity(request.memory_by_worker.len());
    for (worker, memory) in request.memory_by_worker.iter().enumerate() {
        let mut deepest = Blocks::ZERO;
        let PromptTierDepths { device, with_host, with_disk } = *memory;
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

fn view(worker: usize, fleet: &FleetView<'_>) -> WorkerView {
    let spec = fleet.spec;
    let bytes_per_second = spec.link.tokens_per_second * spec.kv_bytes as f64;
    WorkerView {
        id: id(worker),
        endpoint: format!("worker-{worker}").into(),
        incarnation: Incarnation(1),
        role: WorkerRole::Hybrid,
        models: [ModelId::from(MODEL)].into(),
        ranks: 1,
        health: WorkerHealth::Ready,
        kv_index_state: KvIndexState::Exact,
        load: WorkerLoad::default(),
        capacity: WorkerCapacity { kv: spec.sizes.device, block: fleet.block, context: Tokens::ZERO },
        speeds: EngineSpeed {
            prefill_tokens_per_second: 1.0 / spec.timing.prefill_token,
            decode_step: micros(spec.timing.decode_step),
            decode_slowdown: Micros::ZERO,
        },
        kv_bytes_per_token: Bytes(spec.kv_bytes),
        link: Some(KvLink {
            fabric: "fabric".into(),
            fixed: micros(spec.link.fixed),
            bytes_per_second,
            carries: KvLinkCapability::Prefixes,
        }),
    }
}

fn id(worker: usize) -> WorkerId {
    WorkerId(worker as u64)
}

fn worker_index(worker: WorkerId) -> usize {
    worker.0 as usize
}

fn owner(worker: usize) -> Owner {
    Owner { worker: id(worker), incarnation: Incarnation(1), rank: DpRank(0) }
}

fn micros(seconds: f64) -> Micros {
    Micros((seconds * 1e6).max(0.0) as u64)
}

/// Agents that are idle and whose next step is expected.
#[derive(Default)]
struct IdleAgents(BTreeMap<(usize, u32), IdleAgent>);

#[derive(Clone)]
struct IdleAgent {
    after: StepRef,
    /// Expected next step: the last prompt and its answer, of which only the length is known.
    expected: TraceStep,
    is_sent: bool,
}

impl IdleAgents {
    fn insert(&mut self, after: StepRef, step: &TraceStep) {
        let expected = TraceStep { prompt: step.prompt + step.answer, ..step.clone() };
        self.0.insert((after.session, step.agent), IdleAgent { after, expected, is_sent: false });
    }

    /// Removes an agent whose next step has arrived.
    fn remove(&mut self, session: usize, agent: u32) {
        self.0.remove(&(session, agent));
    }

    fn session_finished(&mut self, session: usize) {
        self.0.retain(|(own, _), _| *own != session);
    }
}

impl OwnerServe {
    /// Returns the replications that pay, best first. Nothing is sent twice while an agent is idle. A replication only
    /// makes a copy; ownership changes with the commit of the next step.
    fn worthwhile_replications(&mut self, fleet: &FleetView<'_>) -> Vec<((IdleAgent, SessionId), ChosenReplication)> {
        let unsent: Vec<_> = self.idle_agents.0.values().filter(|agent| !agent.is_sent).cloned().collect();
        let bounds = ReplicationLimits::default();
        let mut moves = Vec::new();
        for agent in unsent {
            let resident = resident_depths(&agent.expected, fleet);
            let request = PlacementRequest {
                at: agent.after,
                step: &agent.expected,
                is_independent: false,
                memory_by_worker: &resident,
            };
            let (chosen, located) =
                self.with_inputs(&request, fleet, |inputs| planner::plan_prefix_replication(inputs, &bounds));
            moves.extend(chosen.ok().map(|chosen| ((agent, located.session.id), chosen)));
        }
        moves.sort_by_key(|((agent, _), chosen)| (Reverse(chosen.saves - chosen.costs), agent.after));
        moves
    }

    /// Records that a replication has started.
    fn record_replication(
        &mut self,
        fleet: &FleetView<'_>,
        ((agent, id), chosen): ((IdleAgent, SessionId), ChosenReplication),
    ) -> ReplicationOrder {
        let IdleAgent { after, expected, .. } = agent;
        if let Some(agent) = self.idle_agents.0.get_mut(&(after.session, expected.agent)) {
            agent.is_sent = true;
        }
        let (from, to) = (worker_index(chosen.from), worker_index(chosen.to));
        let until = chosen.blocks.tokens(fleet.block);
        let cached = fleet.workers[to].cached_depths(fleet.runs, &expected.path).device;
        let footprint = StepFootprint { tokens: until, cached, capacity: fleet.spec.sizes.device };
        self.occupancy.prefix_replicated(owner(to), id, footprint, micros(fleet.now.0));
        ReplicationOrder { after, path: expected.path, from, to, until }
    }
}

fn resident_depths(step: &TraceStep, fleet: &FleetView<'_>) -> Vec<PromptTierDepths> {
    fleet.workers.iter().map(|engine| engine.cached_depths(fleet.runs, &step.path)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::sessions;

    #[test]
    fn expected_answer_is_learned_unless_the_ablation_gives_its_length() {
        let (trace, session) = (sessions(), SessionId(1));
        let learnt = |mut own: OwnerServe| {
            own.occupancy.answer_completed(session, Tokens(9_000));
            own
        };
        let (own, told) = (learnt(OwnerServe::default()), learnt(OwnerServe::without(Ablation::KnownOutputLength)));
        let expected = own.occupancy.expected_answer(session);
        assert!(expected > OwnerServe::default().occupancy.expected_answer(session));
        assert!(trace.steps().all(|step| own.expected_answer(session, step) == expected));
        assert!(trace.steps().all(|step| told.expected_answer(session, step) == step.answer));
    }
}
