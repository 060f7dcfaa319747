use engine_model::runs::{Memory, RunEngine, RunId, Runs, Seconds};
use planner::Action;
use vocabulary::{Micros, Tokens};

use super::readers::read;
use crate::policies::{Ablation, Ask, Dispatch, Fetch, Fleet, Policy, PolicyKind, StepRef};
use crate::report::Figures;
use crate::trace::Step;
use crate::{Setup, Spec, World};

/// Three workers and one conversation whose prompts grow by 6,400 tokens a step.
struct Talk {
    runs: Runs,
    path: Vec<RunId>,
    engines: Vec<RunEngine>,
    policy: Box<dyn Policy>,
    step: usize,
    now: f64,
}

impl Talk {
    fn new() -> Self {
        let mut runs = Runs::default();
        let mut path = Vec::new();
        for _ in 0..10 {
            path.push(runs.add(path.last().copied(), 6_400));
        }
        let spec = Spec::H100_8B;
        let engines = (0..3).map(|_| RunEngine::new(spec.timing, spec.sizes, runs.len())).collect();
        Self { runs, path, engines, policy: PolicyKind::OwnerServe.make(1), step: 0, now: 0.0 }
    }

    /// The next step, of which each worker holds so many runs; it is over before the one after it comes.
    fn next(&mut self, held: [usize; 3]) -> Dispatch {
        let (spec, index) = (Spec::H100_8B, self.step);
        self.step += 1;
        self.now += 5.0;
        let workers: Vec<&RunEngine> = self.engines.iter().collect();
        let fleet = Fleet {
            now: Seconds(self.now),
            workers: &workers,
            spec: &spec,
            runs: &self.runs,
            block: Tokens(64),
            attention: None,
        };
        let held = held.map(|runs| {
            let tokens = self.runs.end(&self.path[..runs]);
            Memory::on_device(tokens)
        });
        let step = self.asked(Tokens(200));
        let at = StepRef { session: 0, step: index };
        let dispatch = self.policy.place(&Ask { at, step: &step, alone: false, held: &held }, &fleet);
        self.policy.finished(at, &step, Seconds(self.now + 1.0));
        dispatch
    }

    fn asked(&self, answer: Tokens) -> Step {
        let path = &self.path[..self.step];
        Step {
            agent: 0,
            after: Vec::new(),
            think: Micros::ZERO,
            at: Micros::ZERO,
            prompt: self.runs.end(path) + Tokens(10),
            answer,
            path: path.into(),
            resent: None,
        }
    }

    /// Work that waits at a worker.
    fn busy(&mut self, worker: usize, seconds: f64) {
        self.engines[worker].submit(engine_model::runs::Prompt {
            ticket: engine_model::runs::Ticket(9),
            path: [].into(),
            tokens: Tokens(100_000),
            answer: Tokens(1),
            resent: None,
            answered: engine_model::runs::Where::Here,
            fetched: Vec::new(),
            ready: Seconds(1e9),
            expected: Tokens(100_000),
            expected_work: seconds,
        });
    }
}

#[test]
fn a_conversation_stays_with_its_owner_while_that_is_idle() {
    let mut talk = Talk::new();
    let home = talk.next([0, 0, 0]).decode;
    for step in 1..5 {
        let held = [0, 1, 2].map(|worker| if worker == home { step } else { 0 });
        let dispatch = talk.next(held);
        assert_eq!((dispatch.prefill, dispatch.decode, dispatch.fetch), (home, home, None));
    }
}

#[test]
fn an_overloaded_owner_loses_the_session_for_good() {
    let mut talk = Talk::new();
    let home = talk.next([0, 0, 0]).decode;
    (1..3).for_each(|step| _ = talk.next([0, 1, 2].map(|worker| if worker == home { step } else { 0 })));
    talk.busy(home, 30.0);
    let moved = talk.next([0, 1, 2].map(|worker| if worker == home { 3 } else { 0 }));
    assert_ne!(moved.decode, home);
    // Its state comes along: links do not wait for the engine's queue.
    let fetch = Some(Fetch { from: home, until: Tokens(19_200) });
    let action = moved.foretold.map(|foretold| foretold.action);
    assert_eq!((moved.prefill, moved.fetch, action), (moved.decode, fetch, Some(Action::StateMigration)));
    // From now on it is the other one's, even though the first one still holds most of it.
    let next = talk.next([0, 1, 2].map(|worker| if worker == moved.decode { 4 } else { 3 }));
    assert_eq!((next.decode, next.fetch), (moved.decode, None));
}

#[test]
fn what_no_finished_step_has_computed_is_not_sent() {
    let mut talk = Talk::new();
    talk.busy(0, 5.0);
    // Somebody holds a prompt of which nothing is sealed.
    let dispatch = talk.next([1, 0, 0]);
    assert_eq!(dispatch.fetch, None);
    assert_ne!(dispatch.decode, 0);
}

#[test]
fn equal_talks_get_equal_plans() {
    let plans = || {
        let mut talk = Talk::new();
        talk.busy(1, 0.7);
        (0..8).map(|step| talk.next([step / 2, step, step / 3])).collect::<Vec<_>>()
    };
    assert_eq!(plans(), plans());
}

#[test]
fn requests_on_their_own_spread_over_idle_workers() {
    let row = |at: u64| {
        format!(r#"{{"timestamp": {}, "input_length": 600, "output_length": 1, "hash_ids": [{at}]}}"#, at * 10_000)
    };
    let trace = read(&(0..30).map(row).collect::<Vec<_>>().join("\n"));
    let (spec, mut policy) = (Spec::H100_8B, PolicyKind::OwnerServe.make(1));
    let engines: Vec<RunEngine> = (0..3).map(|_| RunEngine::new(spec.timing, spec.sizes, trace.runs.len())).collect();
    let workers: Vec<&RunEngine> = engines.iter().collect();
    let (now, block) = (Seconds::ZERO, Tokens(512));
    let fleet = Fleet { now, workers: &workers, spec: &spec, runs: &trace.runs, block, attention: None };
    let mut served = [0; 3];
    for (index, step) in trace.steps().enumerate() {
        let at = StepRef { session: 0, step: index };
        served[policy.place(&Ask { at, step, alone: true, held: &[Memory::default(); 3] }, &fleet).decode] += 1;
    }
    assert!(served.iter().all(|count| *count >= 4), "{served:?}");
}

#[test]
fn a_step_without_a_plan_is_counted() {
    let (spec, runs, step) = (Spec::H100_8B, Runs::default(), Talk::new().asked(Tokens(1)));
    let fleet =
        Fleet { now: Seconds::ZERO, workers: &[], spec: &spec, runs: &runs, block: Tokens(64), attention: None };
    let mut policy = PolicyKind::OwnerServe.make(1);
    let at = StepRef { session: 0, step: 0 };
    assert_eq!(policy.unplanned(), 0);
    policy.place(&Ask { at, step: &step, alone: false, held: &[] }, &fleet);
    assert_eq!(policy.unplanned(), 1, "nobody is there to plan with");
}

/// Conversations of 41,000 tokens whose tools answer within two seconds, so many at once on two workers that hold four each.
fn tool_loops(at_once: usize, kind: PolicyKind) -> Figures {
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
    let mut spec = Spec::H100_8B;
    spec.sizes.device = Tokens(180_000);
    let setup = Setup { workers: 2, spec, load: at_once as f64, seed: 1 };
    World::new(&trace, kind, setup).unwrap().run(&mut |_, _| {})
}

#[test]
fn beyond_memory_steps_wait_rather_than_push_out_each_others_state() {
    let (waiting, thrashing) =
        (tool_loops(14, PolicyKind::OwnerServe), tool_loops(14, PolicyKind::Without(Ablation::NoAdmission)));
    assert_eq!((waiting.steps, thrashing.steps), (480, 480));
    assert!(waiting.service.spent.held_back > 0.0 && thrashing.service.spent.held_back == 0.0);
    assert!(waiting.reuse.prefill_tokens * 2 < thrashing.reuse.prefill_tokens, "{waiting:?}\n{thrashing:?}");
    assert!(waiting.session.mean * 1.3 < thrashing.session.mean, "{waiting:?}\n{thrashing:?}");
}

#[test]
fn where_memory_is_enough_steps_wait_for_hardly_anything() {
    let (waiting, at_once) =
        (tool_loops(6, PolicyKind::OwnerServe), tool_loops(6, PolicyKind::Without(Ablation::NoAdmission)));
    // Only for sessions that are over, which nobody tells: until they have been idle for longer.
    assert!(waiting.service.spent.held_back < 0.03, "{waiting:?}");
    assert!(waiting.session.mean < 1.03 * at_once.session.mean, "{waiting:?}\n{at_once:?}");
}
