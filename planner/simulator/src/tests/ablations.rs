use crate::policies::{Ablation, PolicyKind};
use crate::report::{Figures, ablation_table, ablations, cells};
use crate::tests::sessions;
use crate::trace::Limits;
use crate::{Setup, Spec, World};

/// Sessions at once.
const LOAD: f64 = 7.0;

/// Three workers without room for all sessions, so that state moves.
fn run(kind: PolicyKind) -> Figures {
    run_at(kind, LOAD)
}

fn run_at(kind: PolicyKind, load: f64) -> Figures {
    let trace = sessions().within(&Limits::default());
    let mut spec = Spec::H100_8B;
    spec.sizes.device = vocabulary::Tokens(200_000);
    World::new(&trace, kind, Setup { workers: 3, spec, load, seed: 1 }).unwrap().run(&mut |_, _| {})
}

fn without(ablation: Ablation) -> Figures {
    run(PolicyKind::Without(ablation))
}

fn taken(figures: &Figures, action: &str) -> usize {
    figures.service.actions.get(action).copied().unwrap_or_default()
}

#[test]
fn what_is_switched_off_is_not_done_and_all_is_served() {
    let whole = run(PolicyKind::OwnerServe);
    assert!(taken(&whole, "state_migration") > 0 && whole.reuse.fetched_rate > 0.0, "{:?}", whole.service.actions);
    let no_fetch = without(Ablation::NoFetch);
    assert_eq!((no_fetch.reuse.fetched_rate, taken(&no_fetch, "state_migration")), (0.0, 0));
    assert_eq!(taken(&without(Ablation::NoMigration), "state_migration"), 0);
    assert_eq!(taken(&without(Ablation::NoReplicas), "artifact_fetch"), 0);
    assert_eq!(taken(&without(Ablation::NoRemotePrefill), "remote_prefill"), 0);
    for ablation in Ablation::ALL {
        let figures = without(ablation);
        assert_eq!((figures.unserved, figures.service.unplanned, figures.steps), (0, 0, whole.steps), "{ablation:?}");
    }
}

#[test]
fn wrong_beliefs_and_missing_prices_give_other_plans() {
    let whole = run(PolicyKind::OwnerServe);
    for ablation in [
        Ablation::NoEvictionPrice,
        Ablation::SlowBelief,
        Ablation::FastBelief,
        Ablation::UnevenBelief,
        Ablation::ToldLength,
    ] {
        let figures = without(ablation);
        assert_ne!((&figures.step, &figures.service.actions), (&whole.step, &whole.service.actions), "{ablation:?}");
    }
}

#[test]
fn only_what_is_shown_is_late() {
    // A second decides little where pauses are longer, at some loads nothing.
    let [whole, late] = [PolicyKind::OwnerServe, PolicyKind::Without(Ablation::Late)]
        .map(|policy| [7.0, 9.0, 11.0, 14.0, 18.0, 22.0, 26.0].map(|load| run_at(policy, load)));
    let pairs = || late.iter().zip(&whole);
    // It is shown otherwise, and so decides otherwise; engines find what they have.
    assert!(pairs().any(|(late, whole)| (&late.reuse, &late.step) != (&whole.reuse, &whole.step)));
    for (late, whole) in pairs() {
        // Nearly all is known when a step comes.
        assert!(late.reuse.hit_rate > 0.8 * whole.reuse.hit_rate, "{} {}", late.reuse.hit_rate, whole.reuse.hit_rate);
    }
}

#[test]
fn each_ablation_is_a_row_beside_the_whole() {
    let whole = run(PolicyKind::OwnerServe);
    let mut other = Figures { policy: Ablation::NoFetch.as_str(), ..whole.clone() };
    other.step.mean *= 2.0;
    other.reuse.prefill_tokens *= 4;
    let runs = [whole, other.clone()];
    let worth = ablations(&runs, &cells(&runs));
    assert_eq!((worth.len(), worth[0].policy, worth[0].load), (1, "ownerserve_no_fetch", LOAD));
    let ratio = |figure: &str| worth[0].ratios[figure].map(|mean| mean.mean);
    assert_eq!([ratio("step_mean_s"), ratio("prefill_mtok"), ratio("ttft_mean_s")], [2.0, 4.0, 1.0].map(Some));
    assert_eq!(ablation_table(&worth)[1][4], "2.000");
    assert_eq!(ablations(&[other.clone()], &cells(&[other])), [], "there is nothing to hold it against");
}
