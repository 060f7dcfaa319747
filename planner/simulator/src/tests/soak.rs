use super::readers::read;
use crate::policies::PolicyKind;
use crate::trace::Trace;
use crate::{HardwareProfile, SeededRng, Simulation, SimulationSetup};
use vocabulary::Tokens;

/// Random sessions with sub-agents, forks and rewritten histories.
fn random(seed: u64) -> Trace {
    let mut chance = SeededRng::new(seed);
    let sessions: Vec<String> = (0..12).map(|number| session(&mut chance, number)).collect();
    read(&sessions.join("\n"))
}

fn session(chance: &mut SeededRng, number: u64) -> String {
    let (mut requests, mut lengths, mut agents) = (Vec::new(), Vec::<u64>::new(), 1);
    for index in 0..5 + chance.below(20) {
        let (agent, fresh) = match chance.below(8) {
            0 => (agents, true),
            1 if agents > 1 => (agents - 1, false),
            _ => (0, false),
        };
        agents += u64::from(fresh);
        let parent = if index == 0 || fresh { None } else { Some(chance.below(index)) };
        let keep = parent.map_or(0, |parent| chance.below(lengths[parent as usize] + 1));
        let blocks = keep + 1 + chance.below(60);
        let par = parent.map_or(-1, |parent| parent as i64);
        requests.push(format!(
            r#"{{"t": {}, "agent": {agent}, "in": {}, "out": {}, "think": {}, "par": {par}, "keep": {keep}, "runs": [[{}, {}]]}}"#,
            index * 10,
            blocks * 64 + chance.below(64),
            chance.below(300),
            chance.below(20),
            100_000 * number + 1_000 * index,
            blocks - keep,
        ));
        lengths.push(blocks);
    }
    format!(r#"{{"id": "{number}", "block_size": 64, "tool_tokens": 64, "reqs": [{}]}}"#, requests.join(","))
}

#[test]
fn random_traffic_is_fully_served_and_never_beats_the_bounds() {
    for seed in 0..6 {
        let trace = random(seed);
        let longest = trace.steps().map(|step| (step.prompt + step.answer).0).max().unwrap();
        let mut spec = HardwareProfile::H100_8B;
        // Hardly more memory than the longest step needs, so a worker can do little else beside it.
        (spec.sizes.device, spec.sizes.host) = (Tokens(longest + 2_000), Tokens(seed % 2 * 20_000));
        let setup = SimulationSetup { workers: 4, spec, load: 6.0, seed };
        let run = |kind| Simulation::new(&trace, kind, setup).unwrap().run(&mut |_, _| {});
        let oracle = run(PolicyKind::Oracle);
        for kind in PolicyKind::ALL {
            let figures = run(kind);
            let steps = trace.steps().count();
            assert_eq!((figures.steps, figures.unserved), (steps, 0), "{kind:?} of seed {seed}");
            assert!(figures.reuse.prefill_tokens >= oracle.reuse.prefill_tokens, "{kind:?} of seed {seed}");
            assert!(figures.ttft.mean >= 0.999 * oracle.ttft.mean, "{kind:?} of seed {seed}");
            assert!(
                (0.0..=1.0).contains(&figures.service.decode_stall_share) && figures.service.prefill_utilization <= 1.0
            );
            assert!(figures.memory.duplicate_factor <= 4.0 && figures.reuse.cache_hit_rate <= 1.0);
        }
    }
}

#[test]
fn more_workers_never_slow_the_oracle() {
    let trace = random(3);
    let steps = [1, 2, 4].map(|workers| {
        let setup = SimulationSetup { workers, spec: HardwareProfile::H100_8B, load: 6.0, seed: 1 };
        Simulation::new(&trace, PolicyKind::Oracle, setup).unwrap().run(&mut |_, _| {}).step.mean
    });
    assert!(steps[0] > steps[1] && steps[1] >= steps[2], "{steps:?}");
}

#[test]
fn workers_twice_as_fast_take_half_the_time() {
    let trace = random(5);
    let run = |factor: f64| {
        let mut spec = HardwareProfile::H100_8B;
        let timing = &mut spec.timing;
        for speed in
            [&mut timing.prefill_token, &mut timing.attention_pair, &mut timing.decode_step, &mut timing.context_token]
        {
            *speed *= factor;
        }
        let setup = SimulationSetup { workers: 3, spec, load: 1.0, seed: 1 };
        Simulation::new(&trace, PolicyKind::SessionPinning, setup).unwrap().run(&mut |_, _| {})
    };
    let (once, twice) = (run(1.0), run(2.0));
    assert_eq!(once.reuse.prefill_tokens, twice.reuse.prefill_tokens);
    assert!((twice.session.mean / once.session.mean - 2.0).abs() < 0.02, "{once:?} {twice:?}");
}
