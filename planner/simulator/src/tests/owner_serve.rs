use engine_model::runs::{PromptTierDepths, RunEngine, RunId, RunTree, Seconds};
use planner::Action;
use vocabulary::{Micros, Tokens};

use super::readers::read;
use crate::policies::{
    Ablation, Dispatch, FetchOrder, FleetView, PlacementRequest, PolicyKind, RoutingPolicy, StepRef,
};
use crate::report::RunStats;
use crate::trace::TraceStep;
use crate::{HardwareProfile, Simulation, SimulationSetup};

/// Three workers, and one conversation whose prompts grow by 6,400 tokens per step.
struct ConversationFixture {
    runs: RunTree,
    path: Vec<RunId>,
    engines: Vec<RunEngine>,
    policy: Box<dyn RoutingPolicy>,
    step: usize,
    now: f64,
}

impl ConversationFixture {
    fn new() -> Self {
        let mut runs = RunTree::default();
        let mut path = Vec::new();
        for _ in 0..10 {
            path.push(runs.add(path.last().copied(), 6_400));
        }
        let spec = HardwareProfile::H100_8B;
        let engines = (0..3).map(|_| RunEngine::new(spec.timing, spec.sizes, runs.len())).collect();
        Self { runs, path, engines, policy: PolicyKind::OwnerServe.build(1), step: 0, now: 0.0 }
    }

    /// Places the next step, of which each worker holds this many runs, and finishes it.
    fn next(&mut self, held: [usize; 3]) -> Dispatch {
        let (spec, index) = (HardwareProfile::H100_8B, self.step);
        self.step += 1;
        self.now += 5.0;
        let workers: Vec<&RunEngine> = self.engines.iter().collect();
        let fleet = FleetView {
            now: Seconds(self.now),
            workers: &workers,
            spec: &spec,
            runs: &self.runs,
            block: Tokens(64),
            attention: None,
        };
        let held = held.map(|runs| {
            let tokens = self.runs.end_depth(&self.path[..runs]);
            PromptTierDepths::on_device(tokens)
        });
        let step = self.asked(Tokens(200));
        let at = StepRef { session: 0, step: index };
        let dispatch = self
            .policy
            .place(&PlacementRequest { at, step: &step, is_independent: false, memory_by_worker: &held }, &fleet);
        self.policy.step_finished(at, &step, Seconds(self.now + 1.0));
        dispatch
    }

    fn asked(&self, answer: Tokens) -> TraceStep {
        let path = &self.path[..self.step];
        TraceStep {
            agent: 0,
            after: Vec::new(),
            pause: Micros::ZERO,
            at: Micros::ZERO,
            prompt: self.runs.end_depth(path) + Tokens(10),
            answer,
            path: path.into(),
            resent_path: None,
        }
    }

    /// Queues work at a worker.
    fn busy(&mut self, worker: usize, seconds: f64) {
        self.engines[worker].submit(engine_model::runs::RunRequest {
            ticket: engine_model::runs::RunRequestId(9),
            path: [].into(),
            tokens: Tokens(100_000),
            answer: Tokens(1),
            expected_history: None,
            decode_location: engine_model::runs::DecodeLocation::Local,
            fetched_runs: Vec::new(),
            ready_at: Seconds(1e9),
            expected: Tokens(100_000),
            expected_work: seconds,
        });
    }
}

#[test]
fn conversation_stays_with_its_idle_owner() {
    let mut talk = ConversationFixture::new();
    let home = talk.next([0, 0, 0]).decode;
    for step in 1..5 {
        let held = [0, 1, 2].map(|worker| if worker == home { step } else { 0 });
        let dispatch = talk.next(held);
        assert_eq!((dispatch.prefill, dispatch.decode, dispatch.fetch), (home, home, None));
    }
}

#[test]
fn overloaded_owner_permanently_loses_the_session() {
    let mut talk = ConversationFixture::new();
    let home = talk.next([0, 0, 0]).decode;
    (1..3).for_each(|step| _ = talk.next([0, 1, 2].map(|worker| if worker == home { step } else { 0 })));
    talk.busy(home, 30.0);
    let moved = talk.next([0, 1, 2].map(|worker| if worker == home { 3 } else { 0 }));
    assert_ne!(moved.decode, home);
    // The KV is sent along: links do not wait for the engine's queue.
    let fetch = Some(FetchOrder { from: home, until: Tokens(19_200) });
    let action = moved.prediction.map(|prediction| prediction.action);
    assert_eq!((moved.prefill, moved.fetch, action), (moved.decode, fetch, Some(Action::StateMigration)));
    // From now on the new worker owns the session, although the first one still holds most of it.
    let next = talk.next([0, 1, 2].map(|worker| if worker == moved.decode { 4 } else { 3 }));
    assert_eq!((next.decode, next.fetch), (moved.decode, None));
}

#[test]
fn unsealed_prefix_is_not_fetched() {
    let mut talk = ConversationFixture::new();
    talk.busy(0, 5.0);
    // A worker holds part of the prompt, but nothing is sealed.
    let dispatch = talk.next([1, 0, 0]);
    assert_eq!(dispatch.fetch, None);
    assert_ne!(dispatch.decode, 0);
}

#[test]
fn equal_conversations_get_equal_plans() {
    let plans = || {
        let mut talk = ConversationFixture::new();
        talk.busy(1, 0.7);
        (0..8).map(|step| talk.next([step / 2, step, step / 3])).collect::<Vec<_>>()
    };
    assert_eq!(plans(), plans());
}

#[test]
fn independent_requests_spread_over_idle_workers() {
    let row = |at: u64| {
        format!(r#"{{"timestamp": {}, "input_length": 600, "output_length": 1, "hash_ids": [{at}]}}"#, at * 10_000)
    };
    let trace = read(&(0..30).map(row).collect::<Vec<_>>().join("\n"));
    let (spec, mut policy) = (HardwareProfile::H100_8B, PolicyKind::OwnerServe.build(1));
    let engines: Vec<RunEngine> = (0..3).map(|_| RunEngine::new(spec.timing, spec.sizes, trace.runs.len())).collect();
    let workers: Vec<&RunEngine> = engines.iter().collect();
    let (now, block) = (Seconds::ZERO, Tokens(512));
    let fleet = FleetView { now, workers: &workers, spec: &spec, runs: &trace.runs, block, attention: None };
    let mut served = [0; 3];
    for (index, step) in trace.steps().enumerate() {
        let at = StepRef { session: 0, step: index };
        served[policy
            .place(
                &PlacementRequest {
                    at,
                    step,
                    is_independent: true,
                    memory_by_worker: &[PromptTierDepths::default(); 3],
                },
                &fleet,
            )
            .decode] += 1;
    }
    assert!(served.iter().all(|count| *count >= 4), "{served:?}");
}

#[test]
fn step_without_a_plan_is_counted() {
    let (spec, runs, step) =
        (HardwareProfile::H100_8B, RunTree::default(), ConversationFixture::new().asked(Tokens(1)));
    let fleet =
        FleetView { now: Seconds::ZERO, workers: &[], spec: &spec, runs: &runs, block: Tokens(64), attention: None };
    let mut policy = PolicyKind::OwnerServe.build(1);
    let at = StepRef { session: 0, step: 0 };
    assert_eq!(policy.fallback_steps(), 0);
    policy.place(&PlacementRequest { at, step: &step, is_independent: false, memory_by_worker: &[] }, &fleet);
    assert_eq!(policy.fallback_steps(), 1, "nobody is there to plan with");
}

/// Conversations of 41,000 tokens whose tools answer within two seconds, `at_once` of them on two workers that hold
/// four each.
fn tool_loops(at_once: usize, kind: PolicyKind) -> RunStats {
    let request = |session: usize, step: usize| {
        let (keep, blocks) = if step == 0 { (0, 640) } else { (638 + 2 * step, 2) };
        format!(
            r#"{{"t": {}, "agent": 0, "in": {}, "out": 60, "think": 2, "par": {}, "keep": {keep}, "runs": [[{}, {blocks}]]}}"#,
            10 * step,
            64 * (keep + blocks) + 7,
            step as i64 - 1,
            10_000 * session + 1 + keep,
        )
    };
    let session = |session: usize| {
        let steps: Vec<String> = (0..12).map(|step| request(session, step)).collect();
        format!(r#"{{"id": "{session}", "block_size": 64, "tool_tokens": 64, "reqs": [{}]}}"#, steps.join(","))
    };
    let trace = read(&(0..40).map(session).collect::<Vec<_>>().join("\n"));
    let mut spec = HardwareProfile::H100_8B;
    spec.sizes.device = Tokens(180_000);
    let setup = SimulationSetup { workers: 2, spec, load: at_once as f64, seed: 1 };
    Simulation::new(&trace, kind, setup).unwrap().run(&mut |_, _| {})
}

#[test]
fn admission_control_queues_steps_instead_of_thrashing() {
    let (waiting, thrashing) =
        (tool_loops(14, PolicyKind::OwnerServe), tool_loops(14, PolicyKind::Ablated(Ablation::NoAdmission)));
    assert_eq!((waiting.steps, thrashing.steps), (480, 480));
    assert!(
        waiting.service.step_breakdown.admission_wait > 0.0 && thrashing.service.step_breakdown.admission_wait == 0.0
    );
    assert!(waiting.reuse.prefill_tokens * 2 < thrashing.reuse.prefill_tokens, "{waiting:?}\n{thrashing:?}");
    assert!(waiting.session.mean * 1.3 < thrashing.session.mean, "{waiting:?}\n{thrashing:?}");
}

#[test]
fn sufficient_memory_causes_almost_no_queueing() {
    let (waiting, at_once) =
        (tool_loops(6, PolicyKind::OwnerServe), tool_loops(6, PolicyKind::Ablated(Ablation::NoAdmission)));
    // Steps wait only because of sessions that have ended, until these have been idle long enough: nothing reports
    // their end.
    assert!(waiting.service.step_breakdown.admission_wait < 0.03, "{waiting:?}");
    assert!(waiting.session.mean < 1.03 * at_once.session.mean, "{waiting:?}\n{at_once:?}");
}
