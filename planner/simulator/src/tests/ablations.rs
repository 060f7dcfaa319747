use crate::policies::{Ablation, PolicyKind};
use crate::report::{RunStats, ablation_table, ablations, summarize_policies};
use crate::tests::sessions;
use crate::trace::ReplayLimits;
use crate::{HardwareProfile, Simulation, SimulationSetup};

/// Concurrent sessions.
const LOAD: f64 = 7.0;

/// Runs three workers whose memory cannot hold all sessions, so that KV moves.
fn run(kind: PolicyKind) -> RunStats {
    run_at(kind, LOAD)
}

fn run_at(kind: PolicyKind, load: f64) -> RunStats {
    let trace = sessions().apply_limits(&ReplayLimits::default());
    let mut spec = HardwareProfile::H100_8B;
    spec.sizes.device = vocabulary::Tokens(200_000);
    Simulation::new(&trace, kind, SimulationSetup { workers: 3, spec, load, seed: 1 }).unwrap().run(&mut |_, _| {})
}

fn without(ablation: Ablation) -> RunStats {
    run(PolicyKind::Ablated(ablation))
}

fn taken(stats: &RunStats, action: &str) -> usize {
    stats.service.actions.get(action).copied().unwrap_or_default()
}

#[test]
fn ablated_features_are_unused_and_every_step_is_served() {
    let whole = run(PolicyKind::OwnerServe);
    assert!(taken(&whole, "state_migration") > 0 && whole.reuse.prefetched_share > 0.0, "{:?}", whole.service.actions);
    let no_fetch = without(Ablation::NoFetch);
    assert_eq!((no_fetch.reuse.prefetched_share, taken(&no_fetch, "state_migration")), (0.0, 0));
    assert_eq!(taken(&without(Ablation::NoMigration), "state_migration"), 0);
    assert_eq!(taken(&without(Ablation::NoReplicas), "artifact_fetch"), 0);
    assert_eq!(taken(&without(Ablation::NoRemotePrefill), "remote_prefill"), 0);
    for ablation in Ablation::ALL {
        let figures = without(ablation);
        assert_eq!(
            (figures.unserved, figures.service.fallback_steps, figures.steps),
            (0, 0, whole.steps),
            "{ablation:?}"
        );
    }
}

#[test]
fn wrong_inputs_and_missing_costs_change_the_plans() {
    let whole = run(PolicyKind::OwnerServe);
    for ablation in [
        Ablation::NoEvictionCost,
        Ablation::UnderestimatedSpeed,
        Ablation::OverestimatedSpeed,
        Ablation::UnevenSpeedError,
        Ablation::KnownOutputLength,
    ] {
        let figures = without(ablation);
        assert_ne!((&figures.step, &figures.service.actions), (&whole.step, &whole.service.actions), "{ablation:?}");
    }
}

#[test]
fn delayed_residency_affects_only_what_the_policy_sees() {
    // A delay of one second matters little when pauses are longer, and not at all at some loads.
    let [whole, late] = [PolicyKind::OwnerServe, PolicyKind::Ablated(Ablation::DelayedResidency)]
        .map(|policy| [7.0, 9.0, 11.0, 14.0, 18.0, 22.0, 26.0].map(|load| run_at(policy, load)));
    let pairs = || late.iter().zip(&whole);
    // The policy sees different residency and so decides differently; engines still hit what they hold.
    assert!(pairs().any(|(late, whole)| (&late.reuse, &late.step) != (&whole.reuse, &whole.step)));
    for (late, whole) in pairs() {
        // Nearly everything is known by the time a step arrives.
        assert!(
            late.reuse.cache_hit_rate > 0.8 * whole.reuse.cache_hit_rate,
            "{} {}",
            late.reuse.cache_hit_rate,
            whole.reuse.cache_hit_rate
        );
    }
}

#[test]
fn each_ablation_is_a_row_of_ratios_to_the_full_planner() {
    let whole = run(PolicyKind::OwnerServe);
    let mut other = RunStats { policy: Ablation::NoFetch.as_str(), ..whole.clone() };
    other.step.mean *= 2.0;
    other.reuse.prefill_tokens *= 4;
    let runs = [whole, other.clone()];
    let worth = ablations(&runs, &summarize_policies(&runs));
    assert_eq!((worth.len(), worth[0].policy, worth[0].load), (1, "ownerserve_no_fetch", LOAD));
    let ratio = |figure: &str| worth[0].ratios[figure].map(|mean| mean.mean);
    assert_eq!([ratio("step_mean_s"), ratio("prefill_mtok"), ratio("ttft_mean_s")], [2.0, 4.0, 1.0].map(Some));
    assert_eq!(ablation_table(&worth)[1][4], "2.000");
    assert_eq!(ablations(&[other.clone()], &summarize_policies(&[other])), [], "there is nothing to hold it against");
}
