//! Every way a plan can be illegal: a legal one, spoilt in one place.

use vocabulary::{Blocks, Carries, DpRank, Epoch, Health, Tokens};

use super::{Scene, id};
use crate::*;

const FETCH: &str = "
    session owner=a sealed=99
    ask answer=100
    worker a hybrid holds=99 health=draining
    worker b hybrid
    worker x hybrid fabric=mooncake holds=99 running=90
    worker p prefill backlog=90000 fabric=none";
const REMOTE: &str = "
    ask prompt=16000
    worker p prefill
    worker d decode running=8
    worker x prefill fabric=mooncake";

/// What `check` says of the scene's own plan after `spoil`.
#[track_caller]
fn spoilt(scene: &str, spoil: impl FnOnce(&mut Scene, &mut Plan)) -> Illegal {
    let mut scene = Scene::read(scene);
    let mut plan = scene.plan().plan;
    assert_eq!(plan.check(&scene.inputs()), Ok(()));
    spoil(&mut scene, &mut plan);
    plan.check(&scene.inputs()).unwrap_err()
}

#[test]
fn a_target_that_cannot_compute_prompts_is_no_place_for_one_leg_or_a_prefix() {
    let needs = |scene: &mut Scene, _: &mut Plan| {
        scene.workers.iter_mut().for_each(|view| view.link.iter_mut().for_each(|link| link.carries = Carries::Prompts));
    };
    assert_eq!(spoilt(FETCH, needs), Illegal::NeedsPrefiller(id("b")));
    assert_eq!(spoilt("worker a hybrid", needs), Illegal::NeedsPrefiller(id("a")));
}

#[test]
fn who_only_receives_is_no_source() {
    let only = |scene: &mut Scene, which: &str| {
        let views = scene.workers.iter_mut().filter(|view| view.id == id(which));
        views.for_each(|view| view.link.iter_mut().for_each(|link| link.carries = Carries::PrefixesIn));
    };
    assert_eq!(spoilt(FETCH, |scene, _| only(scene, "a")), Illegal::SendsNothing(id("a")));
    let mut scene = Scene::read(FETCH);
    let with = scene.plan().candidates.iter().filter(|one| one.handoff.is_some() && one.refused.is_none()).count();
    only(&mut scene, "a");
    let without = scene.plan().candidates.iter().filter(|one| one.handoff.is_some() && one.refused.is_none()).count();
    assert!(with > 0 && without == 0, "{with} {without}");
    only(&mut scene, "b");
    assert_eq!(scene.plan().plan.check(&scene.inputs()), Ok(()), "it computes all of it itself");
}

fn both(plan: &mut Plan, change: impl Fn(&mut Leg)) {
    change(&mut plan.prefill);
    change(&mut plan.decode);
}

/// Changes the source and the depth of the plan's replicate.
fn replicate(plan: &mut Plan, name: &str, depth: u64) {
    let Some(Handoff::Replicate { from, blocks, .. }) = &mut plan.handoff else { panic!("no replicate: {plan:?}") };
    (*from, *blocks) = (id(name), Blocks(depth));
}

#[test]
fn a_leg_must_lie_at_a_worker_that_can_take_part() {
    let at = |name: &'static str| spoilt(FETCH, move |_, plan| both(plan, |leg| leg.worker = id(name)));
    assert_eq!(at("z"), Illegal::NoSuchWorker(id("z")));
    assert_eq!(at("p"), Illegal::PrefillOnly(id("p")));
    assert_eq!(spoilt(FETCH, |_, plan| plan.decode.rank = DpRank(1)), Illegal::NoSuchRank(id("b")));
    assert_eq!(spoilt(FETCH, |scene, _| scene.excluded.push(id("b"))), Illegal::Excluded(id("b")));
    let gone = spoilt(FETCH, |scene, _| scene.workers[1].health = Health::Unreachable);
    assert_eq!(gone, Illegal::Unreachable(id("b")));
    assert_eq!(spoilt(FETCH, |scene, _| scene.ask.adapter = Some("lora".into())), Illegal::WrongModel(id("b")));
    let short = spoilt(FETCH, |scene, _| scene.workers[1].capacity.context = Tokens(1_699));
    assert_eq!(short, Illegal::TooLong(id("b")));
}

#[test]
fn a_prefill_leg_must_take_part_too() {
    assert_eq!(spoilt(REMOTE, |scene, _| scene.excluded.push(id("p"))), Illegal::Excluded(id("p")));
    let gone = spoilt(REMOTE, |scene, _| scene.workers[0].health = Health::Unreachable);
    assert_eq!(gone, Illegal::Unreachable(id("p")));
}

#[test]
fn legs_coincide_unless_one_prefills_for_the_other() {
    let differ = Illegal::LegsDiffer;
    assert_eq!(spoilt("worker a hybrid\n worker b hybrid", |_, p| p.prefill.tokens_cached = Tokens(1)), differ);
    assert_eq!(spoilt(FETCH, |_, plan| plan.prefill.worker = id("a")), differ);
    assert_eq!(spoilt(REMOTE, |_, plan| plan.handoff = None), differ);
    assert_eq!(spoilt(REMOTE, |_, plan| plan.prefill = plan.decode), Illegal::ToItself(id("d")));
}

#[test]
fn tokens_add_up_to_the_prompt_and_a_pulling_leg_computes_nothing() {
    let one_more = |leg: &mut Leg| leg.tokens_computed += Tokens(1);
    assert_eq!(spoilt("worker a hybrid", |_, plan| both(plan, one_more)), Illegal::Tokens(id("a")));
    assert_eq!(spoilt(FETCH, |_, plan| both(plan, one_more)), Illegal::Tokens(id("b")));
    assert_eq!(spoilt(REMOTE, |_, plan| one_more(&mut plan.prefill)), Illegal::Tokens(id("p")));
    assert_eq!(spoilt(REMOTE, |_, plan| one_more(&mut plan.decode)), Illegal::Tokens(id("d")));
    let wrap = |leg: &mut Leg| (leg.tokens_cached, leg.tokens_computed) = (Tokens(u64::MAX), Tokens(1_601));
    assert_eq!(spoilt("worker a hybrid", |_, plan| both(plan, wrap)), Illegal::Tokens(id("a")));
}

#[test]
fn a_request_may_forbid_every_handoff() {
    let bar = TransferBar::SeveralChoices;
    for scene in [FETCH, REMOTE] {
        let refused = spoilt(scene, |scene, _| scene.ask.transfers = Transfers::Forbidden(bar));
        assert_eq!(refused, Illegal::TransferForbidden(bar));
    }
}

#[test]
fn kv_moves_only_inside_a_fabric() {
    assert_eq!(spoilt(FETCH, |_, plan| replicate(plan, "x", 99)), Illegal::NoFabric(id("x"), id("b")));
    assert_eq!(spoilt(REMOTE, |_, plan| plan.prefill.worker = id("x")), Illegal::NoFabric(id("x"), id("d")));
    assert_eq!(spoilt(REMOTE, |s, _| s.workers[1].link = None), Illegal::NoFabric(id("p"), id("d")));
}

#[test]
fn nothing_moves_over_a_barred_link() {
    let bar = |scene: &mut Scene, from, to| scene.barred.push(BarredLink { from: id(from), to: id(to) });
    assert_eq!(spoilt(FETCH, |scene, _| bar(scene, "a", "b")), Illegal::BarredLink(id("a"), id("b")));
    assert_eq!(spoilt(REMOTE, |scene, _| bar(scene, "p", "d")), Illegal::BarredLink(id("p"), id("d")));
}

#[test]
fn a_replicate_moves_sealed_blocks_that_the_source_holds_up_to_a_boundary() {
    assert_eq!(spoilt(FETCH, |_, plan| replicate(plan, "b", 99)), Illegal::ToItself(id("b")));
    assert_eq!(spoilt(FETCH, |_, plan| replicate(plan, "a", 0)), Illegal::NotSealed(Blocks(0)));
    assert_eq!(spoilt(FETCH, |_, plan| replicate(plan, "a", 100)), Illegal::NotSealed(Blocks(100)));
    assert_eq!(spoilt(FETCH, |s, _| s.session.sealed = Blocks(98)), Illegal::NotSealed(Blocks(99)));
    let whole = spoilt(FETCH, |scene, plan| {
        scene.session.sealed = Blocks(100);
        scene.overlaps[0].blocks = Blocks(100);
        replicate(plan, "a", 100);
    });
    assert_eq!(whole, Illegal::NotSealed(Blocks(100)), "the last token is computed where the answer is");
    assert_eq!(spoilt(FETCH, |s, _| s.overlaps.clear()), Illegal::NotHeld(id("a")));
    assert_eq!(spoilt(FETCH, |s, _| s.workers[0].capacity.block = Tokens(32)), Illegal::Unaligned(Blocks(99)));
    assert_eq!(spoilt(FETCH, |s, _| s.workers[1].capacity.block = Tokens(32)), Illegal::Unaligned(Blocks(99)));
    assert_eq!(spoilt(FETCH, |s, _| s.excluded.push(id("a"))), Illegal::Excluded(id("a")));
}

#[test]
fn a_label_says_what_the_legs_do() {
    let wrong = |scene: &str, action| assert_eq!(spoilt(scene, |_, p| p.action = action), Illegal::Mislabelled(action));
    for action in [Action::ArtifactFetch, Action::RemotePrefill, Action::StateMigration] {
        wrong("worker a hybrid", action);
    }
    for action in [Action::ColocatedPrefill, Action::DecodeContinuation, Action::RemotePrefill] {
        wrong(FETCH, action);
    }
    for action in [Action::ColocatedPrefill, Action::TailRecompute, Action::ArtifactFetch, Action::StateMigration] {
        wrong(REMOTE, action);
    }
    let borrowed = spoilt(FETCH, |_, plan| plan.claim = Claim::Borrow);
    assert_eq!(borrowed, Illegal::Mislabelled(Action::StateMigration), "a migration moves the ownership");
    let off = spoilt(FETCH, |scene, _| scene.policy.disabled.push(Action::StateMigration));
    assert_eq!(off, Illegal::Disabled(Action::StateMigration));
}

#[test]
fn a_claim_agrees_with_who_owns_the_session() {
    let owned = "session owner=a sealed=99\n worker a hybrid holds=99";
    for claim in [Claim::Open, Claim::Borrow] {
        assert_eq!(spoilt(owned, |_, plan| plan.claim = claim), Illegal::Claim);
    }
    assert_eq!(spoilt(owned, |s, _| s.session.owner = None), Illegal::Claim);
    assert_eq!(spoilt("worker a hybrid", |_, plan| plan.claim = Claim::Keep), Illegal::Claim);
    assert_eq!(spoilt("worker a hybrid", |_, plan| plan.claim = Claim::Borrow), Illegal::Claim);
    let newer = Epoch { generation: 0, index: 8, position: 0 };
    assert_eq!(spoilt(FETCH, |s, _| s.session.epoch = newer), Illegal::Claim, "decided on an older epoch");
    let restarted = spoilt(owned, |s, _| s.workers[0].incarnation.0 += 1);
    assert_eq!(restarted, Illegal::Claim, "another life of the owner owns nothing");
}

#[test]
fn every_refusal_of_a_plan_names_who_and_why() {
    assert_eq!(
        Illegal::TransferForbidden(TransferBar::Endpoint).to_string(),
        "the request forbids transfers: Endpoint"
    );
    assert!(Illegal::NoFabric(id("a"), id("b")).to_string().contains("share no fabric"));
    assert_eq!(Illegal::Mislabelled(Action::ArtifactFetch).to_string(), "artifact_fetch is not what the legs do");
}
