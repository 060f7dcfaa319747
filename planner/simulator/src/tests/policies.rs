use std::collections::BTreeSet;

use engine_model::runs::{Around, Memory, Prompt, RunEngine, Runs, Seconds, Ticket, Where};
use vocabulary::{Micros, Tokens};

use super::readers::sessions;
use crate::policies::{Admission, Ask, Dispatch, Fleet, Policy, PolicyKind, StepRef, Stopwatch, every};
use crate::trace::{Limits, Step};
use crate::{Setup, Spec, World};

/// Idle workers, and a step of which each holds so many tokens.
struct Scene {
    spec: Spec,
    runs: Runs,
    engines: Vec<RunEngine>,
    held: Vec<Memory>,
    step: Step,
}

impl Scene {
    fn of(prompt: u64, held: &[u64]) -> Self {
        let (spec, mut runs) = (Spec::H100_8B, Runs::default());
        let path = [runs.add(None, prompt as u32)];
        let engine = || RunEngine::new(spec.timing, spec.sizes, runs.len());
        let memory = |tokens: &u64| Memory::on_device(Tokens(*tokens));
        let step = Step {
            agent: 0,
            after: Vec::new(),
            think: Micros::ZERO,
            at: Micros::ZERO,
            prompt: Tokens(prompt),
            answer: Tokens(100),
            path: path.into(),
            resent: None,
        };
        Self {
            spec,
            engines: held.iter().map(|_| engine()).collect(),
            runs,
            held: held.iter().map(memory).collect(),
            step,
        }
    }

    /// Requests that a worker has been sent and has not begun.
    fn busy(mut self, worker: usize, requests: usize) -> Self {
        (0..requests).for_each(|_| self.engines[worker].expect_arrival());
        self
    }

    /// A worker that has served the prompt, and has it cached.
    fn served(mut self, worker: usize) -> Self {
        let (engine, mut out) = (&mut self.engines[worker], Vec::new());
        let mut around = Around { runs: &self.runs, shared: None };
        engine.expect_answer(self.step.prompt);
        engine.submit(Prompt {
            ticket: Ticket(1),
            path: self.step.path.clone(),
            tokens: self.step.prompt,
            answer: self.step.answer,
            resent: None,
            answered: Where::Here,
            fetched: Vec::new(),
            ready: Seconds::ZERO,
            expected: self.step.prompt,
            expected_work: 0.0,
        });
        engine.begin(&mut around, &mut out);
        while let Some(at) = engine.next_event(&around) {
            engine.settle(at, &around);
            engine.happen(&mut around, &mut out);
        }
        assert_eq!((engine.memory_in_use(), engine.memory_taken()), (Tokens::ZERO, self.step.prompt));
        self
    }

    fn decoding(mut self, worker: usize, context: u64) -> Self {
        self.engines[worker].expect_answer(Tokens(context));
        self
    }

    fn with<T>(&self, session: usize, ask: impl FnOnce(&Ask<'_>, &Fleet<'_>) -> T) -> T {
        let workers: Vec<&RunEngine> = self.engines.iter().collect();
        let (now, block) = (Seconds(1.0), Tokens(64));
        let fleet = Fleet { now, workers: &workers, spec: &self.spec, runs: &self.runs, block, attention: None };
        let at = StepRef { session, step: 0 };
        ask(&Ask { at, step: &self.step, alone: false, held: &self.held }, &fleet)
    }

    fn place(&self, policy: &mut dyn Policy) -> Dispatch {
        self.with(0, |ask, fleet| policy.place(ask, fleet))
    }

    /// Where a fresh policy of this kind computes and answers.
    fn placed(&self, kind: PolicyKind) -> (usize, usize) {
        let dispatch = self.place(&mut *kind.make(1));
        (dispatch.prefill, dispatch.decode)
    }
}

#[test]
fn names_are_read_back_and_others_refused() {
    let all: Vec<_> = every().collect();
    let names: BTreeSet<_> = all.iter().map(|kind| kind.as_str()).collect();
    assert_eq!(names.len(), all.len());
    for kind in all {
        assert_eq!(kind.as_str().parse(), Ok(kind));
    }
    let error = "fastest".parse::<PolicyKind>().unwrap_err().to_string();
    assert!(error.starts_with("there is no policy `fastest`; accepted: round_robin, least_loaded,"), "{error}");
}

#[test]
fn each_policy_looks_at_its_own_things() {
    let scene = || Scene::of(10_000, &[9_000, 0, 9_500]);
    assert_eq!(scene().placed(PolicyKind::PrefixAffinity), (2, 2));
    assert_eq!(scene().placed(PolicyKind::LeastLoaded), (0, 0));
    assert_eq!(scene().busy(0, 1).placed(PolicyKind::LeastLoaded), (1, 1));
    // Nearly as much as the deepest one is as good.
    assert_eq!(scene().busy(2, 1).placed(PolicyKind::MultiOwner), (0, 0));
    assert_eq!(scene().busy(2, 1).busy(0, 1).placed(PolicyKind::MultiOwner), (0, 0));
    assert_eq!(scene().busy(2, 3).placed(PolicyKind::MatchRateMinusLoad), (0, 0));
    assert_eq!(scene().busy(2, 2).busy(0, 2).busy(1, 2).placed(PolicyKind::MatchRateMinusLoad), (2, 2));
    // A prefix weighs 3; the rest is alike at idle workers.
    assert_eq!(scene().placed(PolicyKind::Llmd), (2, 2));
    // 500 tokens to compute and 2,000 decoded beside 1,000 to compute.
    assert_eq!(scene().placed(PolicyKind::Dynamo), (2, 2));
    assert_eq!(scene().decoding(2, 2_000).placed(PolicyKind::Dynamo), (0, 0));
}

#[test]
fn disaggregation_keeps_the_halves_apart_and_the_conditional_one_only_when_it_pays() {
    let scene = Scene::of(10_000, &[0, 4_000, 0, 9_000]);
    assert_eq!(scene.placed(PolicyKind::StaticPd), (1, 2));
    assert_eq!(scene.placed(PolicyKind::ConditionalPd), (3, 3), "1,000 new tokens are computed where they are");
    assert_eq!(Scene::of(10_000, &[0, 4_000, 0, 5_000]).placed(PolicyKind::ConditionalPd), (1, 3));
    assert_eq!(
        Scene::of(1_000, &[0, 0, 0, 0]).placed(PolicyKind::ConditionalPd),
        (0, 2),
        "short, but all of it is new"
    );
}

#[test]
fn sessions_spread_and_stay_until_they_are_over() {
    let scene = Scene::of(1_000, &[0, 0]);
    let mut policy = PolicyKind::SessionPinning.make(1);
    let place = |session, policy: &mut dyn Policy| scene.with(session, |ask, fleet| policy.place(ask, fleet).decode);
    let homes: Vec<_> = [1, 2, 3, 1, 2].map(|session| place(session, &mut *policy)).into();
    assert_eq!(homes, [0, 1, 0, 0, 1]);
    policy.session_over(1);
    policy.session_over(3);
    assert_eq!(place(4, &mut *policy), 0);
}

#[test]
fn two_random_workers_are_never_the_same_one_and_a_seed_repeats_them() {
    let scene = Scene::of(1_000, &[0, 0]).busy(0, 1);
    let mut policy = PolicyKind::PowerOfTwo.make(3);
    assert!((0..50).all(|_| scene.place(&mut *policy).decode == 1), "of two workers both are looked at");
    let scene = Scene::of(1_000, &[0; 9]);
    let drawn = |seed| {
        let mut policy = PolicyKind::PowerOfTwo.make(seed);
        (0..20).map(|_| scene.place(&mut *policy).decode).collect::<Vec<_>>()
    };
    assert_eq!(drawn(5), drawn(5));
    assert_ne!(drawn(5), drawn(6));
}

#[test]
fn what_can_be_evicted_is_free_memory_to_llm_d_as_engines_report_it() {
    let scene = || Scene::of(10_000, &[0, 0]).served(0);
    assert_eq!(scene().placed(PolicyKind::Llmd), (0, 0), "both are free");
    assert_eq!(scene().placed(PolicyKind::LlmdCachedCounts), (1, 1));
}

#[test]
fn sglang_goes_by_what_it_sent_until_loads_are_far_apart() {
    let scene = Scene::of(1_000, &[0, 0]);
    let mut policy = PolicyKind::Sglang.make(1);
    assert_eq!(scene.place(&mut *policy).decode, 0);
    let far = Scene::of(1_000, &[0, 0]).busy(0, 64);
    assert_eq!(far.place(&mut *policy).decode, 0, "64 requests apart are not far");
    let farther = Scene::of(1_000, &[0, 0]).busy(0, 65);
    assert_eq!(farther.place(&mut *policy).decode, 1);
}

#[test]
fn programs_wait_while_their_contexts_do_not_fit_and_go_on_when_others_are_over() {
    let scene = Scene::of(150_000, &[0]);
    let mut policy = PolicyKind::Thunder.make(1);
    let admit = |session, policy: &mut dyn Policy| scene.with(session, |ask, fleet| policy.admit(ask, fleet));
    let due = |policy: &mut dyn Policy| scene.with(0, |_, fleet| policy.due(fleet));
    assert_eq!([1, 2].map(|session| admit(session, &mut *policy)), [Admission::Now; 2]);
    assert_eq!(admit(3, &mut *policy), Admission::Later, "three contexts of 150,000 do not fit into 400,000");
    assert_eq!(due(&mut *policy), []);
    policy.session_over(1);
    assert_eq!(due(&mut *policy), [StepRef { session: 3, step: 0 }]);
    assert_eq!(admit(3, &mut *policy), Admission::Now);
    // Contexts have grown: the shortest program in a tool call loses its place, and its next step waits.
    let grown = Step { prompt: Tokens(280_000), ..scene.step.clone() };
    policy.finished(StepRef { session: 2, step: 0 }, &scene.step, Seconds(9.0));
    policy.finished(StepRef { session: 3, step: 0 }, &grown, Seconds(9.0));
    assert_eq!(due(&mut *policy), []);
    assert_eq!(admit(2, &mut *policy), Admission::Later);
}

#[test]
fn the_planner_keeps_a_session_where_its_state_is_and_leaves_a_busy_owner() {
    let scene = Scene::of(50_000, &[0, 48_000, 0]);
    assert_eq!(scene.placed(PolicyKind::OwnerServe), (1, 1));
    let trace = sessions().within(&Limits::default());
    let mut spec = Spec::H100_8B;
    spec.sizes.device = Tokens(200_000);
    let run = |kind: PolicyKind, load| {
        World::new(&trace, kind, Setup { workers: 3, spec, load, seed: 1 }).unwrap().run(&mut |_, _| {})
    };
    let (own, random) = (run(PolicyKind::OwnerServe, 6.0), run(PolicyKind::RoundRobin, 6.0));
    assert!(own.reuse.prefill_tokens * 2 < random.reuse.prefill_tokens, "{own:#?}");
    assert!(own.step.mean < random.step.mean);
    assert_eq!(own.service.actions.values().sum::<usize>(), own.steps);
    assert!(own.service.actions.contains_key("colocated_prefill"), "{:?}", own.service.actions);
    assert!(own.memory.kv_bytes_moved > 0, "nothing was fetched: {:?}", own.service.actions);
}

#[test]
fn no_policy_beats_the_bounds() {
    let trace = sessions().within(&Limits::default());
    let mut spec = Spec::H100_8B;
    spec.sizes.device = Tokens(200_000);
    let setup = Setup { workers: 3, spec, load: 8.0, seed: 1 };
    let run = |kind| World::new(&trace, kind, setup).unwrap().run(&mut |_, _| {});
    let (oracle, pooled) = (run(PolicyKind::Oracle), run(PolicyKind::Pooled));
    assert!(oracle.reuse.prefill_tokens <= pooled.reuse.prefill_tokens);
    for kind in PolicyKind::ALL {
        let figures = run(kind);
        assert!(figures.reuse.prefill_tokens >= oracle.reuse.prefill_tokens, "{kind:?}");
        assert!(figures.step.mean >= 0.999 * oracle.step.mean, "{kind:?}");
    }
}

#[test]
fn a_stopwatch_sees_every_decision_and_changes_none() {
    #[derive(Default)]
    struct Counter(std::cell::Cell<(usize, usize)>);
    impl Stopwatch for Counter {
        fn start(&self) {
            self.0.set((self.0.get().0 + 1, self.0.get().1));
        }
        fn stop(&self) {
            self.0.set((self.0.get().0, self.0.get().1 + 1));
        }
    }
    let trace = sessions().within(&Limits::default());
    let setup = Setup { workers: 3, spec: Spec::H100_8B, load: 8.0, seed: 1 };
    for kind in [PolicyKind::OwnerServe, PolicyKind::Thunder] {
        let (world, counter) = (|| World::new(&trace, kind, setup).unwrap(), Counter::default());
        let figures = world().watched(&counter).run(&mut |_, _| {});
        assert_eq!((counter.0.get(), &figures), ((778, 778), &world().run(&mut |_, _| {})), "{kind:?}");
    }
}
