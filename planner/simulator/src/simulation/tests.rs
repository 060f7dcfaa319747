//! Execution of dispatches, with a scripted policy.

use std::collections::VecDeque;

use engine_model::runs::{DecodeLocation, PromptTierDepths, RunRequest};

use super::*;
use planner::ReplicateSendTiming;

use crate::LinkSpeed;
use crate::policies::{Dispatch, FetchOrder, FleetView, HandoffPayload, PlacementRequest};
use crate::report::DiskStats;
use crate::tests::{read, sessions};
use crate::trace::ReplayLimits;

struct ScriptedPolicy(VecDeque<Dispatch>);

impl RoutingPolicy for ScriptedPolicy {
    fn place(&mut self, _request: &PlacementRequest<'_>, _fleet: &FleetView<'_>) -> Dispatch {
        self.0.pop_front().expect("every step is told")
    }
}

/// One conversation of three steps of 6,400 tokens, each of which continues the previous one.
fn talk() -> Trace {
    read(&recorded_talk())
}

fn recorded_talk() -> String {
    let request = |at: u64, blocks: u64, par: i64, keep: u64, first: u64| {
        format!(
            r#"{{"t": {at}, "agent": 0, "in": {}, "out": 20, "think": 10, "par": {par}, "keep": {keep}, "runs": [[{first}, {}]]}}"#,
            blocks * 64,
            blocks - keep,
        )
    };
    let steps = [request(0, 100, -1, 0, 1), request(60, 200, 0, 100, 500), request(120, 300, 1, 200, 900)];
    format!(r#"{{"id": "a", "block_size": 64, "tool_tokens": 0, "reqs": [{}]}}"#, steps.join(","))
}

fn setup(workers: usize) -> SimulationSetup {
    SimulationSetup { workers, spec: HardwareProfile::H100_8B, load: 1.0, seed: 1 }
}

fn scripted<'a>(trace: &'a Trace, setup: SimulationSetup, dispatches: &[Dispatch]) -> Simulation<'a> {
    let mut world = Simulation::new(trace, PolicyKind::RoundRobin, setup).unwrap();
    world.driver.policy = Box::new(ScriptedPolicy(dispatches.iter().copied().collect()));
    world
}

/// Runs to the end without consuming the simulation.
fn run_to_end(world: &mut Simulation<'_>) {
    world.schedule_initial_events();
    while let Some((at, event)) = world.events.next() {
        assert!(at >= world.now, "time never goes back");
        world.advance_to(at);
        world.handle_event(event);
    }
    for ScheduledEngine { engine, .. } in &world.engines {
        assert_eq!(engine.memory_in_use(), Tokens::ZERO, "nothing is held for nobody");
        assert_eq!((engine.load().requests, engine.load().prompt, engine.load().context), (0, Tokens(0), Tokens(0)));
        assert_eq!((engine.queued(), engine.batch()), (0, (0, 0)));
    }
}

fn near(seen: f64, expected: f64) {
    assert!((seen - expected).abs() < 1e-9 * expected.abs().max(1.0), "{seen} is not {expected}");
}

fn prefill(new: u64, cached: u64) -> f64 {
    HardwareProfile::H100_8B.timing.prefill_time(Tokens(new), Tokens(cached))
}

fn transfer_seconds(tokens: u64) -> f64 {
    tokens as f64 / HardwareProfile::H100_8B.link.tokens_per_second + HardwareProfile::H100_8B.link.fixed
}

#[test]
fn conversation_at_one_worker_computes_only_new_tokens() {
    let trace = talk();
    let figures = scripted(&trace, setup(2), &[Dispatch::at(1); 3]).run(&mut |_, _| {});
    let first = [prefill(6_400, 0), prefill(6_400, 6_400), prefill(6_400, 12_800)];
    near(figures.ttft.mean, first.iter().sum::<f64>() / 3.0);
    assert_eq!((figures.steps, figures.unserved, figures.reuse.prefill_tokens), (3, 0, 19_200));
    near(figures.reuse.cache_hit_rate, (6_400.0 + 12_800.0) / (6_400.0 * 6.0));
    near(figures.reuse.owner_hit_rate, 1.0);
    let timing = HardwareProfile::H100_8B.timing;
    let answer = |prompt: f64| 20.0 * (timing.decode_step + timing.context_token * (prompt + 10.0));
    near(figures.session.mean, first.iter().sum::<f64>() + answer(6_400.0) + answer(12_800.0) + answer(19_200.0));
    // Three steps, and two pauses of ten seconds.
    near(figures.service.seconds, figures.session.mean + 20.0);
}

#[test]
fn fetched_prefix_arrives_before_prefill_and_stays_at_its_source() {
    let trace = talk();
    let fetch = Dispatch { fetch: Some(FetchOrder { from: 0, until: Tokens(6_400) }), ..Dispatch::at(1) };
    let mut world = scripted(&trace, setup(2), &[Dispatch::at(0), fetch, Dispatch::at(1)]);
    run_to_end(&mut world);
    let steps = &trace.sessions[0].steps;
    assert_eq!(world.engines[0].engine.cached_depths(&trace.runs, &steps[0].path).device, Tokens(6_400));
    assert_eq!(world.engines[1].engine.cached_depths(&trace.runs, &steps[2].path).device, Tokens(19_200));
    let figures = world.figures();
    let first = [prefill(6_400, 0), transfer_seconds(6_400) + prefill(6_400, 6_400), prefill(6_400, 12_800)];
    near(figures.ttft.mean, first.iter().sum::<f64>() / 3.0);
    assert_eq!(figures.memory.kv_transfer_bytes, 6_400 * HardwareProfile::H100_8B.kv_bytes);
    near(figures.reuse.prefetched_share, 1.0 / 6.0);
}

#[test]
fn in_turn_transfer_waits_for_the_prompts_of_a_busy_source() {
    let long =
        r#"{"t": 0, "agent": 0, "in": 102400, "out": 1, "think": 0, "par": -1, "keep": 0, "runs": [[5000, 1600]]}"#;
    let other = format!(r#"{{"id": "b", "block_size": 64, "tool_tokens": 0, "reqs": [{long}]}}"#);
    let trace = read(&format!("{}\n{other}", recorded_talk()));
    let fetch = Dispatch { fetch: Some(FetchOrder { from: 0, until: Tokens(6_400) }), ..Dispatch::at(1) };
    let seconds = |sources| {
        let mut setup = SimulationSetup { load: 2.0, ..setup(2) };
        setup.spec.link.sources = sources;
        let dispatches = [Dispatch::at(0), Dispatch::at(0), fetch, Dispatch::at(1)];
        scripted(&trace, setup, &dispatches).run(&mut |_, _| {}).service.seconds
    };
    let timing = HardwareProfile::H100_8B.timing;
    let asks = prefill(6_400, 0) + 20.0 * (timing.decode_step + timing.context_token * 6_410.0) + 10.0;
    // Until then the source computes the second session's prompt, and after that one token for the request that sends.
    let turn = SESSION_START_INTERVAL + prefill(102_400, 0) - asks + timing.decode_step;
    assert!(turn > 0.5, "it is busy for another {turn} s");
    near(seconds(ReplicateSendTiming::Queued) - seconds(ReplicateSendTiming::Immediate), turn);
}

#[test]
fn transfer_waiting_at_a_busy_source_leaves_the_link_free() {
    let mut setup = setup(3);
    setup.spec.link.sources = ReplicateSendTiming::Queued;
    let trace = talk();
    let mut world = scripted(&trace, setup, &[]);
    let path = trace.sessions[0].steps[0].path.clone();
    let runs = &trace.runs;
    for source in [0, 2] {
        assert!(world.engines[source].engine.cache_received(runs, &path));
    }
    let waits = RunRequest {
        ticket: RunRequestId(9),
        path,
        tokens: Tokens(6_400),
        answer: Tokens(1),
        expected_history: None,
        decode_location: DecodeLocation::Local,
        fetched_runs: Vec::new(),
        ready_at: Seconds::ZERO,
        expected: Tokens(6_400),
        expected_work: 5.0,
    };
    world.engines[0].engine.submit(waits);
    let step = &trace.sessions[0].steps[0];
    let mut ready = |from: usize| {
        world.fetch(RunRequestId(from as u32), step, (FetchOrder { from, until: Tokens(6_400) }, 1)).ready.0
    };
    let step = setup.spec.timing.decode_step;
    near(ready(0), 5.0 + step + transfer_seconds(6_400));
    near(ready(2), step.max(transfer_seconds(6_400)) + transfer_seconds(6_400));
}

#[test]
fn remote_prefill_ships_the_missing_or_the_whole_prompt() {
    let trace = talk();
    for (ship, second) in [(HandoffPayload::Missing, 6_400), (HandoffPayload::Whole, 12_800)] {
        let remote = Dispatch { prefill: 0, ship, ..Dispatch::at(1) };
        let mut world = scripted(&trace, setup(2), &[remote, remote, Dispatch::at(1)]);
        run_to_end(&mut world);
        let figures = world.figures();
        let first = [
            prefill(6_400, 0) + transfer_seconds(6_400),
            prefill(6_400, 6_400) + transfer_seconds(second),
            prefill(6_400, 12_800),
        ];
        near(figures.ttft.mean, first.iter().sum::<f64>() / 3.0);
        assert_eq!(figures.memory.kv_transfer_bytes, (6_400 + second) * HardwareProfile::H100_8B.kv_bytes);
        assert_eq!(figures.service.decode_stall_share, 0.0);
    }
}

#[test]
fn link_carries_one_transfer_at_a_time_per_direction() {
    let mut links = LinkSchedule::new(
        3,
        LinkSpeed { tokens_per_second: 1_000.0, fixed: 0.5, sources: ReplicateSendTiming::Immediate },
    );
    near(links.send(Seconds(1.0), (0, 1), Tokens(1_000)).0, 2.5);
    near(links.send(Seconds(1.0), (0, 2), Tokens(1_000)).0, 4.0);
    near(links.send(Seconds(1.0), (1, 0), Tokens(1_000)).0, 2.5);
    near(links.send(Seconds(1.0), (2, 1), Tokens(1_000)).0, 4.0);
    assert_eq!(links.moved_tokens, Tokens(4_000));
}

#[test]
fn every_policy_serves_every_step_deterministically_without_leaks() {
    let trace = sessions().apply_limits(&ReplayLimits::default());
    let mut spec = HardwareProfile::H100_8B;
    (spec.sizes.device, spec.sizes.host, spec.sizes.disk) = (Tokens(160_000), Tokens(100_000), Tokens(300_000));
    let setup = SimulationSetup { workers: 4, spec, load: 9.0, seed: 7 };
    for kind in PolicyKind::ALL {
        let mut world = Simulation::new(&trace, kind, setup).unwrap();
        run_to_end(&mut world);
        let (once, again) = (world.figures(), Simulation::new(&trace, kind, setup).unwrap().run(&mut |_, _| {}));
        assert_eq!(once, again, "{kind:?}");
        assert_eq!((once.steps, once.unserved, once.service.sessions_over), (778, 0, 35), "{kind:?}");
        near(once.service.step_breakdown.parts().iter().sum(), once.step.mean);
        let DiskStats { written_bytes, read_bytes, useful_bytes, .. } = once.memory.disk;
        let is_bound = matches!(kind, PolicyKind::PooledMemory | PolicyKind::Oracle);
        assert_eq!(written_bytes > 0, !is_bound, "{kind:?} has written {written_bytes}");
        assert!(useful_bytes <= read_bytes.min(written_bytes), "{kind:?} {:?}", once.memory.disk);
        assert!(
            once.service.step_breakdown.parts().iter().all(|part| *part >= 0.0),
            "{kind:?} {:?}",
            once.service.step_breakdown
        );
        assert!(
            (0.0..=1.0).contains(&once.service.worker_utilization)
                && once.service.worker_utilization >= once.service.prefill_utilization,
            "{kind:?}"
        );
    }
}

#[test]
fn recorded_requests_are_independent_and_load_scales_their_rate() {
    let row = |at: u64, id: u64| {
        format!(r#"{{"timestamp": {at}, "input_length": 5120, "output_length": 10, "hash_ids": [{}]}}"#, blocks(id))
    };
    fn blocks(id: u64) -> String {
        (0..10).map(|n| (id * 100 + n).to_string()).collect::<Vec<_>>().join(",")
    }
    let trace = read(&[row(0, 1), row(1_000, 1), row(60_000, 2)].join("\n"));
    let ends = |load| {
        Simulation::new(&trace, PolicyKind::LeastLoaded, SimulationSetup { load, ..setup(1) })
            .unwrap()
            .run(&mut |_, _| {})
    };
    let (slow, quick) = (ends(1.0), ends(1_000.0));
    assert!((60.0..61.0).contains(&slow.service.seconds) && quick.service.seconds < 2.0);
    near(slow.ttft.p50, prefill(5_120, 0));
    assert!(quick.ttft.p95 > 1.5 * slow.ttft.p95, "the third request waits for the first one");
    assert_eq!(slow.reuse.prefill_tokens, 2 * 5_120 + 1);
}

#[test]
fn progress_is_reported_until_the_last_step() {
    let trace = sessions().apply_limits(&ReplayLimits::default());
    let mut told = Vec::new();
    Simulation::new(&trace, PolicyKind::SessionPinning, setup(2)).unwrap().run(&mut |over, all| told.push((over, all)));
    assert_eq!(told, [(512, 778), (778, 778)]);
}

#[test]
fn invalid_setup_error_names_the_accepted_values() {
    let trace = talk();
    let said = |kind, setup| Simulation::new(&trace, kind, setup).err().expect("refused").to_string();
    assert_eq!(said(PolicyKind::StaticPd, setup(1)), "static_pd is given 1 workers; accepted: 2 to 1024");
    assert!(said(PolicyKind::RoundRobin, setup(0)).contains("accepted: 1 to 1024"));
    for load in [0.0, 0.5, 2.0, 1e9, f64::NAN] {
        let other = said(PolicyKind::RoundRobin, SimulationSetup { load, ..setup(2) });
        let accepted = "a whole number of sessions at once, 1 to the 1 that the trace has";
        assert_eq!(other, format!("the load is {load}; accepted: {accepted}"));
    }
    let mut small = setup(2);
    small.spec.sizes.device = Tokens(10_000);
    assert!(said(PolicyKind::RoundRobin, small).contains("steps of 19220 tokens and a worker holds 10000"));
    let empty = talk().apply_limits(&ReplayLimits { max_context: Tokens(10), ..ReplayLimits::default() });
    assert_eq!(Simulation::new(&empty, PolicyKind::Oracle, setup(2)).err(), Some(SetupError::Empty));
}

#[test]
fn simultaneous_events_run_in_insertion_order() {
    let mut events = EventQueue::default();
    events.add(Seconds(2.0), WorldEvent::SessionStarts);
    events.add(Seconds(1.0), WorldEvent::PollPolicy);
    events.add(Seconds(2.0), WorldEvent::FetchArrived(RunRequestId(1)));
    assert!(!events.is_empty());
    let order: Vec<_> = std::iter::from_fn(|| events.next()).map(|(at, event)| (at.0, event)).collect();
    let expected = [
        (1.0, WorldEvent::PollPolicy),
        (2.0, WorldEvent::SessionStarts),
        (2.0, WorldEvent::FetchArrived(RunRequestId(1))),
    ];
    assert_eq!(order, expected);
    assert!(events.is_empty());
}

#[test]
fn step_starts_after_all_its_dependencies() {
    let line = r#"{"id": "a", "block_size": 64, "tool_tokens": 0, "reqs": [
        {"t": 0, "agent": 0, "in": 64, "out": 1, "par": -1, "keep": 0, "runs": [[1, 1]]},
        {"t": 1, "agent": 1, "in": 64, "out": 1, "par": -1, "keep": 0, "runs": [[5, 1]]},
        {"t": 1, "agent": 2, "in": 64, "out": 1, "par": -1, "keep": 0, "runs": [[9, 1]]},
        {"t": 9, "agent": 0, "in": 128, "out": 1, "par": 0, "keep": 1, "runs": [[2, 1]]}]}"#;
    let trace = read(&line.replace('\n', ""));
    let mut script = SessionScheduler::new(&trace);
    assert_eq!((script.next_session(), script.next_session()), (Some(0), None));
    assert_eq!(script.start_session(0, &trace.sessions[0]), [0]);
    let mut end = |step| {
        script.finish_step(StepRef { session: 0, step }).map(|followed| (followed.steps, followed.is_session_over))
    };
    assert_eq!(end(0), Some((vec![1, 2], false)));
    assert_eq!(end(2), Some((vec![], false)));
    assert_eq!(end(1), Some((vec![3], false)));
    assert_eq!(end(3), Some((vec![], true)));
    assert_eq!(end(3), None, "a session that is over has no steps");
}

#[test]
fn load_that_stretches_the_trace_too_long_is_rejected() {
    let row = |at: u64| format!(r#"{{"timestamp": {at}, "input_length": 9, "output_length": 1, "hash_ids": []}}"#);
    let of = |last: u64| read(&[row(0), row(last)].join("\n"));
    let said = |trace: &Trace, load| {
        let setup = SimulationSetup { load, ..setup(1) };
        setup.check(trace, PolicyKind::LeastLoaded).map_err(|error| error.to_string())
    };
    let day = of(86_400_000);
    for load in [1e-300, 1e-9, 0.0, -1.0, 1.1e6, f64::INFINITY, f64::NAN] {
        let expected = format!("the load is {load}; accepted: a factor on the recorded rate, 0.001 to 1000000");
        assert_eq!(said(&day, load), Err(expected));
    }
    assert_eq!((said(&day, 0.001), said(&day, 1e6)), (Ok(()), Ok(())));
    let year = of(365 * 86_400_000);
    let expected = "at a load of 0.05 the last request comes after 630720000 s; accepted: up to 315576000 s (ten years), \
                    that is a load from 0.100 on";
    assert_eq!((said(&year, 0.05), said(&year, 0.2)), (Err(expected.to_owned()), Ok(())));
}

#[test]
fn figures_count_sessions_per_gpu_hour_and_memory_occupancy() {
    let (trace, spec) = (talk(), HardwareProfile::H100X4_70B);
    let figures = Simulation::new(&trace, PolicyKind::RoundRobin, SimulationSetup { spec, ..setup(2) })
        .unwrap()
        .run(&mut |_, _| {});
    near(figures.service.sessions_per_gpu_hour, 3_600.0 / (figures.service.seconds * 2.0 * 4.0));
    near(figures.memory.occupancy, 12_800.0 / (2.0 * 460_000.0));
    assert_eq!(
        (figures.memory.samples, figures.memory.hbm_session_capacity),
        (0, 0.0),
        "three steps are too few to look"
    );
}

#[test]
fn step_time_is_broken_down_by_stage() {
    let trace = talk();
    let fetch = Dispatch { fetch: Some(FetchOrder { from: 0, until: Tokens(6_400) }), ..Dispatch::at(1) };
    let remote = Dispatch { prefill: 1, ..Dispatch::at(0) };
    let spent =
        scripted(&trace, setup(2), &[Dispatch::at(0), fetch, remote]).run(&mut |_, _| {}).service.step_breakdown;
    near(spent.fetch, transfer_seconds(6_400) / 3.0);
    near(spent.compute, (prefill(6_400, 0) + prefill(6_400, 6_400) + prefill(6_400, 12_800)) / 3.0);
    // The first worker lacks what the second one has computed.
    near(spent.handoff, transfer_seconds(12_800) / 3.0);
    assert_eq!((spent.admission_wait, spent.queue, spent.restore, spent.recompute), (0.0, 0.0, 0.0, 0.0));
    // The other worker has nothing of the prompt cached.
    let again = scripted(&trace, setup(2), &[Dispatch::at(0), Dispatch::at(1), Dispatch::at(1)]).run(&mut |_, _| {});
    near(again.service.step_breakdown.recompute, prefill(12_800, 0) / 2.0 / 3.0);
    assert_eq!(again.reuse.recomputed_tokens, 6_400);
}

#[test]
fn workers_are_idle_during_the_pauses_of_a_single_session() {
    let trace = talk();
    let figures = scripted(&trace, setup(2), &[Dispatch::at(1); 3]).run(&mut |_, _| {});
    assert_eq!(figures.service.gap_utilization, Some(0.0), "a single session is served by nobody while it pauses");
    near(figures.service.worker_utilization, (figures.service.seconds - 20.0) / (2.0 * figures.service.seconds));
}

#[test]
fn session_capacity_follows_from_kv_bytes_per_active_session() {
    let trace = sessions().apply_limits(&ReplayLimits::default());
    let run = |kind| {
        Simulation::new(&trace, kind, SimulationSetup { load: 6.0, ..setup(2) }).unwrap().run(&mut |_, _| {}).memory
    };
    let (spread, kept, bound) = (run(PolicyKind::RoundRobin), run(PolicyKind::SessionPinning), run(PolicyKind::Oracle));
    let fits = |memory: crate::report::MemoryStats| {
        memory.hbm_session_capacity * memory.active_session_bytes
            / (2.0 * 400_000.0 * HardwareProfile::H100_8B.kv_bytes as f64)
    };
    near(fits(spread), 1.0);
    assert!(spread.active_session_bytes > 1.05 * kept.active_session_bytes, "copies take memory: {spread:?} {kept:?}");
    assert_eq!(
        (bound.samples, bound.hbm_session_capacity),
        (0, 0.0),
        "there is one memory, in which nothing lies twice"
    );
}

/// Two conversations whose steps alternate.
fn talks_in_turn() -> Trace {
    let request = |at: u64, blocks: u64, par: i64, keep: u64, first: u64| {
        format!(
            r#"{{"t": {at}, "agent": 0, "in": {}, "out": 20, "think": 20, "par": {par}, "keep": {keep}, "runs": [[{first}, {}]]}}"#,
            blocks * 64,
            blocks - keep,
        )
    };
    let session = |name: &str, first: u64| {
        let steps = [
            request(0, 100, -1, 0, first),
            request(60, 110, 0, 100, first + 1_000),
            request(120, 120, 1, 110, first + 2_000),
        ];
        format!(r#"{{"id": "{name}", "block_size": 64, "tool_tokens": 0, "reqs": [{}]}}"#, steps.join(","))
    };
    read(&[session("a", 1), session("b", 100_000)].join("\n"))
}

/// Runs both at one worker whose memory holds only one, so that each evicts the other.
fn in_turn(spec: HardwareProfile) -> crate::report::RunStats {
    let trace = talks_in_turn();
    Simulation::new(&trace, PolicyKind::RoundRobin, SimulationSetup { workers: 1, spec, load: 2.0, seed: 1 })
        .unwrap()
        .run(&mut |_, _| {})
}

#[test]
fn disk_restores_are_slower_and_counted_apart_from_host_restores() {
    let run = |host: u64, disk: u64| {
        let mut spec = HardwareProfile::H100_8B;
        (spec.sizes.device, spec.sizes.host, spec.sizes.disk) = (Tokens(8_000), Tokens(host), Tokens(disk));
        (in_turn(spec), spec)
    };
    let ((none, _), (host, spec), (disk, _)) = (run(0, 0), run(100_000, 0), run(0, 100_000));
    let split = |figures: &crate::report::RunStats| figures.reuse.restores.split;
    assert_eq!((none.reuse.restores.steps, none.memory.disk.written_bytes), (0, 0));
    assert_eq!(none.memory.disk.write_amplification(), None);
    assert_eq!((host.reuse.restores.steps, disk.reuse.restores.steps), (3, 3), "the last step is not measured");
    assert_eq!(host.reuse.prefill_tokens, disk.reuse.prefill_tokens);
    // 100 blocks are restored for each second step, and 110 for each third one.
    let tokens = (2 * 6_400 + 7_040) as f64 / 3.0;
    near(split(&host).host, tokens / spec.sizes.host_tokens_per_second);
    near(split(&disk).disk, tokens / spec.sizes.disk_speed.read);
    assert_eq!((split(&host).disk, split(&disk).host, split(&disk).network), (0.0, 0.0, 0.0));
    near(split(&host).compute, split(&disk).compute);
    near(disk.service.step_breakdown.restore, split(&disk).disk * 3.0 / 5.0);
    assert!(none.ttft.mean > disk.ttft.mean && disk.ttft.mean > host.ttft.mean);
    // Every block of the first two steps is read, and written once; what the third steps add is never read.
    let DiskStats { written_bytes, read_bytes, useful_bytes, dropped_bytes } = disk.memory.disk;
    let kv = |tokens: u64| tokens * spec.kv_bytes;
    assert_eq!((read_bytes, useful_bytes, dropped_bytes), (kv(2 * (6_400 + 7_040)), kv(2 * 7_040), 0));
    assert_eq!(disk.memory.disk.write_amplification(), Some(written_bytes as f64 / useful_bytes as f64));
    assert!((kv(2 * 7_040)..=kv(7_040 + 7_680)).contains(&written_bytes), "{written_bytes}");
}

#[test]
fn fetched_prefix_counts_as_a_network_restore() {
    let trace = talk();
    let fetch = Dispatch { fetch: Some(FetchOrder { from: 0, until: Tokens(6_400) }), ..Dispatch::at(1) };
    let figures = scripted(&trace, setup(2), &[Dispatch::at(0), fetch, Dispatch::at(1)]).run(&mut |_, _| {});
    let restores = figures.reuse.restores;
    assert_eq!((restores.steps, restores.split.host, restores.split.disk), (1, 0.0, 0.0));
    near(restores.split.network, transfer_seconds(6_400));
    near(restores.split.compute, prefill(6_400, 6_400));
}

#[test]
fn ledger_of_a_whole_run_keeps_its_invariants_and_every_session() {
    let trace = crate::tests::sessions().apply_limits(&crate::trace::ReplayLimits::default());
    let mut spec = HardwareProfile::H100_8B;
    spec.sizes.device = Tokens(200_000);
    let setup = SimulationSetup { workers: 3, spec, load: 8.0, seed: 1 };
    let mut world = Simulation::new(&trace, PolicyKind::OwnerServe, setup).unwrap();
    world.schedule_initial_events();
    let mut before = ledger::Ledger::default();
    while let Some((at, event)) = world.events.next() {
        world.advance_to(at);
        world.handle_event(event);
        let Some(ledger) = world.driver.policy.ledger().filter(|ledger| ledger.applied() > before.applied() + 500)
        else {
            continue;
        };
        ledger::invariants::check(ledger).unwrap();
        ledger::invariants::check_step(&before, ledger).unwrap();
        before = ledger.clone();
    }
    let ledger = world.driver.policy.ledger().unwrap();
    ledger::invariants::check(ledger).unwrap();
    let agents: usize = trace
        .sessions
        .iter()
        .map(|session| session.steps.iter().map(|step| step.agent).collect::<std::collections::BTreeSet<_>>().len())
        .sum();
    assert_eq!(ledger.session_count(), agents);
    assert!(ledger.sessions().all(|session| ledger.session_owner(&session).is_some() && !session.heads.is_empty()));
    let epochs = |session: &ledger::Session| session.epoch.index;
    assert!(ledger.sessions().any(|session| epochs(&session) > 1_000), "nothing moved late");
}

#[test]
fn remote_host_tier_kv_is_loaded_at_its_source_before_transfer() {
    let trace = talks_in_turn();
    let mut spec = HardwareProfile::H100_8B;
    (spec.sizes.device, spec.sizes.host) = (Tokens(8_000), Tokens(100_000));
    // The second conversation has evicted the first one's 100 blocks when its second step goes elsewhere.
    let fetch = Dispatch { fetch: Some(FetchOrder { from: 0, until: Tokens(6_400) }), ..Dispatch::at(1) };
    let dispatches = [Dispatch::at(0), Dispatch::at(0), fetch, Dispatch::at(0), Dispatch::at(1), Dispatch::at(0)];
    let setup = SimulationSetup { workers: 2, spec, load: 2.0, seed: 1 };
    let figures = scripted(&trace, setup, &dispatches).run(&mut |_, _| {});
    let restores = figures.reuse.restores;
    assert_eq!((restores.steps, figures.reuse.prefill_tokens), (1, 2 * 7_680), "nothing is computed twice");
    near(restores.split.network, 6_400.0 / spec.sizes.host_tokens_per_second + transfer_seconds(6_400));
    near(restores.split.compute, prefill(640, 6_400));
}

#[test]
fn restore_estimate_counts_tokens_in_lower_tiers() {
    let trace = talk();
    let (world, spec) = (scripted(&trace, setup(1), &[]), HardwareProfile::H100_8B);
    let held = PromptTierDepths { device: Tokens(100), with_host: Tokens(300), with_disk: Tokens(600) };
    let (host, read) = (spec.sizes.host_tokens_per_second, spec.sizes.disk_speed.read);
    near(world.restoring(&held, Tokens::ZERO), 200.0 / host + 300.0 / read);
    near(world.restoring(&held, Tokens(250)), 50.0 / host + 300.0 / read);
    near(world.restoring(&held, Tokens(400)), 200.0 / read);
    assert_eq!(world.restoring(&held, Tokens(600)), 0.0);
}
