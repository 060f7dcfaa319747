use std::collections::BTreeSet;

use engine_model::runs::{
    DecodeLocation, PromptTierDepths, RunEngine, RunRequest, RunRequestId, RunTree, Seconds, SharedEngineState,
};
use vocabulary::{Micros, Tokens};

use super::readers::sessions;
use crate::policies::{
    Dispatch, FleetView, PlacementRequest, PolicyKind, RoutingPolicy, StepAdmission, StepRef, Stopwatch, all_policies,
};
use crate::trace::{ReplayLimits, TraceStep};
use crate::{HardwareProfile, Simulation, SimulationSetup};

/// Idle workers, and a step of which each worker holds some tokens.
struct PlacementScene {
    spec: HardwareProfile,
    runs: RunTree,
    engines: Vec<RunEngine>,
    held: Vec<PromptTierDepths>,
    step: TraceStep,
}

impl PlacementScene {
    fn of(prompt: u64, held: &[u64]) -> Self {
        let (spec, mut runs) = (HardwareProfile::H100_8B, RunTree::default());
        let path = [runs.add(None, prompt as u32)];
        let engine = || RunEngine::new(spec.timing, spec.sizes, runs.len());
        let memory = |tokens: &u64| PromptTierDepths::on_device(Tokens(*tokens));
        let step = TraceStep {
            agent: 0,
            after: Vec::new(),
            pause: Micros::ZERO,
            at: Micros::ZERO,
            prompt: Tokens(prompt),
            answer: Tokens(100),
            path: path.into(),
            resent_path: None,
        };
        Self {
            spec,
            engines: held.iter().map(|_| engine()).collect(),
            runs,
            held: held.iter().map(memory).collect(),
            step,
        }
    }

    /// Adds requests that were sent to a worker and have not started.
    fn busy(mut self, worker: usize, requests: usize) -> Self {
        (0..requests).for_each(|_| self.engines[worker].expect_arrival());
        self
    }

    /// Lets a worker serve the prompt, so that it has it cached.
    fn served(mut self, worker: usize) -> Self {
        let (engine, mut out) = (&mut self.engines[worker], Vec::new());
        let mut around = SharedEngineState { runs: &self.runs, shared: None };
        engine.expect_answer(self.step.prompt);
        engine.submit(RunRequest {
            ticket: RunRequestId(1),
            path: self.step.path.clone(),
            tokens: self.step.prompt,
            answer: self.step.answer,
            expected_history: None,
            decode_location: DecodeLocation::Local,
            fetched_runs: Vec::new(),
            ready_at: Seconds::ZERO,
            expected: self.step.prompt,
            expected_work: 0.0,
        });
        engine.begin_next_prefill(&mut around, &mut out);
        while let Some(at) = engine.next_event(&around) {
            engine.advance_clock(at, &around);
            engine.handle_due_work(&mut around, &mut out);
        }
        assert_eq!((engine.memory_in_use(), engine.memory_used()), (Tokens::ZERO, self.step.prompt));
        self
    }

    fn decoding(mut self, worker: usize, context: u64) -> Self {
        self.engines[worker].expect_answer(Tokens(context));
        self
    }

    fn with<T>(&self, session: usize, ask: impl FnOnce(&PlacementRequest<'_>, &FleetView<'_>) -> T) -> T {
        let workers: Vec<&RunEngine> = self.engines.iter().collect();
        let (now, block) = (Seconds(1.0), Tokens(64));
        let fleet = FleetView { now, workers: &workers, spec: &self.spec, runs: &self.runs, block, attention: None };
        let at = StepRef { session, step: 0 };
        ask(&PlacementRequest { at, step: &self.step, is_independent: false, memory_by_worker: &self.held }, &fleet)
    }

    fn place(&self, policy: &mut dyn RoutingPolicy) -> Dispatch {
        self.with(0, |ask, fleet| policy.place(ask, fleet))
    }

    /// Returns where a new policy of this kind computes and answers.
    fn placed(&self, kind: PolicyKind) -> (usize, usize) {
        let dispatch = self.place(&mut *kind.build(1));
        (dispatch.prefill, dispatch.decode)
    }
}

#[test]
fn policy_names_round_trip_and_unknown_names_are_rejected() {
    let all: Vec<_> = all_policies().collect();
    let names: BTreeSet<_> = all.iter().map(|kind| kind.as_str()).collect();
    assert_eq!(names.len(), all.len());
    for kind in all {
        assert_eq!(kind.as_str().parse(), Ok(kind));
    }
    let error = "fastest".parse::<PolicyKind>().unwrap_err().to_string();
    assert!(error.starts_with("there is no policy `fastest`; accepted: round_robin, least_loaded,"), "{error}");
}

#[test]
fn each_baseline_chooses_by_its_own_criterion() {
    let scene = || PlacementScene::of(10_000, &[9_000, 0, 9_500]);
    assert_eq!(scene().placed(PolicyKind::PrefixAffinity), (2, 2));
    assert_eq!(scene().placed(PolicyKind::LeastLoaded), (0, 0));
    assert_eq!(scene().busy(0, 1).placed(PolicyKind::LeastLoaded), (1, 1));
    // Nearly the longest prefix is as good as the longest.
    assert_eq!(scene().busy(2, 1).placed(PolicyKind::MultiOwner), (0, 0));
    assert_eq!(scene().busy(2, 1).busy(0, 1).placed(PolicyKind::MultiOwner), (0, 0));
    assert_eq!(scene().busy(2, 3).placed(PolicyKind::MatchRateMinusLoad), (0, 0));
    assert_eq!(scene().busy(2, 2).busy(0, 2).busy(1, 2).placed(PolicyKind::MatchRateMinusLoad), (2, 2));
    // The prefix weighs 3; the other scores are equal for idle workers.
    assert_eq!(scene().placed(PolicyKind::Llmd), (2, 2));
    // 500 tokens to compute and 2,000 being decoded, against 1,000 to compute.
    assert_eq!(scene().placed(PolicyKind::Dynamo), (2, 2));
    assert_eq!(scene().decoding(2, 2_000).placed(PolicyKind::Dynamo), (0, 0));
}

#[test]
fn disaggregation_splits_prefill_and_decode_conditionally_when_it_pays() {
    let scene = PlacementScene::of(10_000, &[0, 4_000, 0, 9_000]);
    assert_eq!(scene.placed(PolicyKind::StaticPd), (1, 2));
    assert_eq!(scene.placed(PolicyKind::ConditionalPd), (3, 3), "1,000 new tokens are computed where they are");
    assert_eq!(PlacementScene::of(10_000, &[0, 4_000, 0, 5_000]).placed(PolicyKind::ConditionalPd), (1, 3));
    assert_eq!(
        PlacementScene::of(1_000, &[0, 0, 0, 0]).placed(PolicyKind::ConditionalPd),
        (0, 2),
        "short, but all of it is new"
    );
}

#[test]
fn session_pinning_spreads_sessions_and_holds_them_until_they_end() {
    let scene = PlacementScene::of(1_000, &[0, 0]);
    let mut policy = PolicyKind::SessionPinning.build(1);
    let place =
        |session, policy: &mut dyn RoutingPolicy| scene.with(session, |ask, fleet| policy.place(ask, fleet).decode);
    let homes: Vec<_> = [1, 2, 3, 1, 2].map(|session| place(session, &mut *policy)).into();
    assert_eq!(homes, [0, 1, 0, 0, 1]);
    policy.session_finished(1);
    policy.session_finished(3);
    assert_eq!(place(4, &mut *policy), 0);
}

#[test]
fn power_of_two_samples_distinct_workers_and_repeats_with_its_seed() {
    let scene = PlacementScene::of(1_000, &[0, 0]).busy(0, 1);
    let mut policy = PolicyKind::PowerOfTwo.build(3);
    assert!((0..50).all(|_| scene.place(&mut *policy).decode == 1), "of two workers both are looked at");
    let scene = PlacementScene::of(1_000, &[0; 9]);
    let drawn = |seed| {
        let mut policy = PolicyKind::PowerOfTwo.build(seed);
        (0..20).map(|_| scene.place(&mut *policy).decode).collect::<Vec<_>>()
    };
    assert_eq!(drawn(5), drawn(5));
    assert_ne!(drawn(5), drawn(6));
}

#[test]
fn llm_d_counts_evictable_memory_as_free() {
    let scene = || PlacementScene::of(10_000, &[0, 0]).served(0);
    assert_eq!(scene().placed(PolicyKind::Llmd), (0, 0), "both are free");
    assert_eq!(scene().placed(PolicyKind::LlmdCachedCounts), (1, 1));
}

#[test]
fn sglang_follows_its_prefix_tree_until_loads_diverge() {
    let scene = PlacementScene::of(1_000, &[0, 0]);
    let mut policy = PolicyKind::Sglang.build(1);
    assert_eq!(scene.place(&mut *policy).decode, 0);
    let far = PlacementScene::of(1_000, &[0, 0]).busy(0, 64);
    assert_eq!(far.place(&mut *policy).decode, 0, "64 requests apart are not far");
    let farther = PlacementScene::of(1_000, &[0, 0]).busy(0, 65);
    assert_eq!(farther.place(&mut *policy).decode, 1);
}

#[test]
fn thunder_agent_queues_programs_until_their_contexts_fit() {
    let scene = PlacementScene::of(150_000, &[0]);
    let mut policy = PolicyKind::ThunderAgent.build(1);
    let admit = |session, policy: &mut dyn RoutingPolicy| scene.with(session, |ask, fleet| policy.admit(ask, fleet));
    let due = |policy: &mut dyn RoutingPolicy| scene.with(0, |_, fleet| policy.due_steps(fleet));
    assert_eq!([1, 2].map(|session| admit(session, &mut *policy)), [StepAdmission::Now; 2]);
    assert_eq!(admit(3, &mut *policy), StepAdmission::Later, "three contexts of 150,000 do not fit into 400,000");
    assert_eq!(due(&mut *policy), []);
    policy.session_finished(1);
    assert_eq!(due(&mut *policy), [StepRef { session: 3, step: 0 }]);
    assert_eq!(admit(3, &mut *policy), StepAdmission::Now);
    // Contexts have grown: the shortest program in a tool call loses its place, and its next step waits.
    let grown = TraceStep { prompt: Tokens(280_000), ..scene.step.clone() };
    policy.step_finished(StepRef { session: 2, step: 0 }, &scene.step, Seconds(9.0));
    policy.step_finished(StepRef { session: 3, step: 0 }, &grown, Seconds(9.0));
    assert_eq!(due(&mut *policy), []);
    assert_eq!(admit(2, &mut *policy), StepAdmission::Later);
}

#[test]
fn ownerserve_keeps_sessions_with_their_state_and_leaves_busy_owners() {
    let scene = PlacementScene::of(50_000, &[0, 48_000, 0]);
    assert_eq!(scene.placed(PolicyKind::OwnerServe), (1, 1));
    let trace = sessions().apply_limits(&ReplayLimits::default());
    let mut spec = HardwareProfile::H100_8B;
    spec.sizes.device = Tokens(200_000);
    let run = |kind: PolicyKind, load| {
        Simulation::new(&trace, kind, SimulationSetup { workers: 3, spec, load, seed: 1 }).unwrap().run(&mut |_, _| {})
    };
    let (own, random) = (run(PolicyKind::OwnerServe, 6.0), run(PolicyKind::RoundRobin, 6.0));
    assert!(own.reuse.prefill_tokens * 2 < random.reuse.prefill_tokens, "{own:#?}");
    assert!(own.step.mean < random.step.mean);
    assert_eq!(own.service.actions.values().sum::<usize>(), own.steps);
    assert!(own.service.actions.contains_key("colocated_prefill"), "{:?}", own.service.actions);
    assert!(own.memory.kv_transfer_bytes > 0, "nothing was fetched: {:?}", own.service.actions);
}

#[test]
fn no_policy_beats_the_bounds() {
    let trace = sessions().apply_limits(&ReplayLimits::default());
    let mut spec = HardwareProfile::H100_8B;
    spec.sizes.device = Tokens(200_000);
    let setup = SimulationSetup { workers: 3, spec, load: 8.0, seed: 1 };
    let run = |kind| Simulation::new(&trace, kind, setup).unwrap().run(&mut |_, _| {});
    let (oracle, pooled) = (run(PolicyKind::Oracle), run(PolicyKind::PooledMemory));
    assert!(oracle.reuse.prefill_tokens <= pooled.reuse.prefill_tokens);
    for kind in PolicyKind::ALL {
        let figures = run(kind);
        assert!(figures.reuse.prefill_tokens >= oracle.reuse.prefill_tokens, "{kind:?}");
        assert!(figures.step.mean >= 0.999 * oracle.step.mean, "{kind:?}");
    }
}

#[test]
fn stopwatch_observes_every_decision_without_changing_it() {
    #[derive(Default)]
    struct CountingStopwatch(std::cell::Cell<(usize, usize)>);
    impl Stopwatch for CountingStopwatch {
        fn start(&self) {
            self.0.set((self.0.get().0 + 1, self.0.get().1));
        }
        fn stop(&self) {
            self.0.set((self.0.get().0, self.0.get().1 + 1));
        }
    }
    let trace = sessions().apply_limits(&ReplayLimits::default());
    let setup = SimulationSetup { workers: 3, spec: HardwareProfile::H100_8B, load: 8.0, seed: 1 };
    for kind in [PolicyKind::OwnerServe, PolicyKind::ThunderAgent] {
        let (world, counter) = (|| Simulation::new(&trace, kind, setup).unwrap(), CountingStopwatch::default());
        let figures = world().with_stopwatch(&counter).run(&mut |_, _| {});
        assert_eq!((counter.0.get(), &figures), ((778, 778), &world().run(&mut |_, _| {})), "{kind:?}");
    }
}
