//! Every way a plan can be illegal: each test spoils one part of a legal plan.

use serde_json::{Value, json};
use vocabulary::{Blocks, DpRank, Epoch, KvLinkCapability, Tokens, WorkerHealth};

use super::{PlanningScene, id};
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

/// Returns the violation found in the scene's own plan after `spoil` has changed it.
#[track_caller]
fn violation_after(scene: &str, spoil: impl FnOnce(&mut PlanningScene, &mut Plan)) -> PlanViolation {
    let mut scene = PlanningScene::read(scene);
    let mut plan = scene.plan().plan;
    assert_eq!(plan.check(&scene.inputs()), Ok(()));
    spoil(&mut scene, &mut plan);
    plan.check(&scene.inputs()).unwrap_err()
}

#[test]
fn target_without_prefill_capability_needs_a_prefill_worker() {
    let needs = |scene: &mut PlanningScene, _: &mut Plan| {
        scene
            .workers
            .iter_mut()
            .for_each(|view| view.link.iter_mut().for_each(|link| link.carries = KvLinkCapability::Prompts));
    };
    assert_eq!(violation_after(FETCH, needs), PlanViolation::NeedsPrefiller(id("b")));
    assert_eq!(violation_after("worker a hybrid", needs), PlanViolation::NeedsPrefiller(id("a")));
}

#[test]
fn receive_only_worker_is_not_a_source() {
    let only = |scene: &mut PlanningScene, which: &str| {
        let views = scene.workers.iter_mut().filter(|view| view.id == id(which));
        views.for_each(|view| view.link.iter_mut().for_each(|link| link.carries = KvLinkCapability::PrefixesIn));
    };
    assert_eq!(violation_after(FETCH, |scene, _| only(scene, "a")), PlanViolation::SendsNothing(id("a")));
    let mut scene = PlanningScene::read(FETCH);
    let transfers = |candidate: &&PlanCandidate| candidate.sequence.has_handoff() && candidate.refusal.is_none();
    let with = scene.plan().candidates.iter().filter(transfers).count();
    only(&mut scene, "a");
    let without = scene.plan().candidates.iter().filter(transfers).count();
    assert!(with > 0 && without == 0, "{with} {without}");
    only(&mut scene, "b");
    assert_eq!(scene.plan().plan.check(&scene.inputs()), Ok(()), "it computes all of it itself");
}

/// Returns the plan's handoff.
fn handoff(plan: &mut Plan) -> &mut Handoff {
    let parts = plan.sequence.before_answer.iter_mut().flatten();
    let mut handoffs =
        parts.filter_map(|part| if let LegOrHandoff::Handoff(handoff) = part { Some(handoff) } else { None });
    handoffs.next().expect("a handoff")
}

/// Returns the plan's prefill leg.
fn prefill(plan: &mut Plan) -> &mut Leg {
    let Some(LegOrHandoff::Leg(leg)) = &mut plan.sequence.before_answer[0] else { panic!("no prefill leg") };
    leg
}

/// Changes the source and the length of the plan's replicate.
fn replicate(plan: &mut Plan, name: &str, depth: u64) {
    let handoff = handoff(plan);
    (handoff.source.worker, handoff.blocks) = (id(name), Some(Blocks(depth)));
}

/// Computes the prompt of a remote prefill at this worker.
fn prefill_at(plan: &mut Plan, name: &str) {
    prefill(plan).worker = id(name);
    handoff(plan).source.worker = id(name);
}

#[test]
fn decode_leg_requires_an_eligible_worker() {
    let at = |name: &'static str| violation_after(FETCH, move |_, plan| plan.sequence.answer.worker = id(name));
    assert_eq!(at("z"), PlanViolation::NoSuchWorker(id("z")));
    assert_eq!(at("p"), PlanViolation::PrefillOnly(id("p")));
    let rank = violation_after(FETCH, |_, plan| plan.sequence.answer.rank = DpRank(1));
    assert_eq!(rank, PlanViolation::NoSuchRank(id("b")));
    assert_eq!(violation_after(FETCH, |scene, _| scene.excluded.push(id("b"))), PlanViolation::Excluded(id("b")));
    let gone = violation_after(FETCH, |scene, _| scene.workers[1].health = WorkerHealth::Unreachable);
    assert_eq!(gone, PlanViolation::Unreachable(id("b")));
    assert_eq!(
        violation_after(FETCH, |scene, _| scene.ask.adapter = Some("lora".into())),
        PlanViolation::WrongModel(id("b"))
    );
    let short = violation_after(FETCH, |scene, _| scene.workers[1].capacity.context = Tokens(1_699));
    assert_eq!(short, PlanViolation::TooLong(id("b")));
}

#[test]
fn prefill_leg_requires_an_eligible_worker() {
    assert_eq!(violation_after(REMOTE, |scene, _| scene.excluded.push(id("p"))), PlanViolation::Excluded(id("p")));
    let gone = violation_after(REMOTE, |scene, _| scene.workers[0].health = WorkerHealth::Unreachable);
    assert_eq!(gone, PlanViolation::Unreachable(id("p")));
}

#[test]
fn only_three_sequences_are_legal() {
    let of = |scene: &str, spoil: fn(&mut LegSequence)| violation_after(scene, |_, plan| spoil(&mut plan.sequence));
    let unsupported = PlanViolation::UnsupportedSequence;
    assert_eq!(of("worker a hybrid", |it| it.answer.role = LegRole::Decode), unsupported);
    assert_eq!(of("worker a hybrid", |it| it.before_answer[0] = Some(LegOrHandoff::Leg(it.answer))), unsupported);
    assert_eq!(of(FETCH, |it| it.answer.role = LegRole::Prefill), unsupported);
    assert_eq!(of(FETCH, |it| it.before_answer[1] = Some(LegOrHandoff::Leg(it.answer))), unsupported);
    assert_eq!(of(FETCH, |it| it.before_answer[1] = it.before_answer[0]), PlanViolation::TooManyHandoffs);
    assert_eq!(of(REMOTE, |it| it.before_answer[0] = it.before_answer[1]), PlanViolation::TooManyHandoffs);
    assert_eq!(of(REMOTE, |it| it.answer.role = LegRole::Serve), unsupported);
    assert_eq!(of(REMOTE, |it| it.before_answer[1] = None), unsupported, "nobody hands over what is computed");
    assert_eq!(of(REMOTE, |it| it.before_answer[0] = None), unsupported, "nobody computes what is handed over");
    assert_eq!(of(REMOTE, |it| it.before_answer.reverse()), unsupported);
    assert_eq!(violation_after(REMOTE, |_, plan| prefill(plan).role = LegRole::Serve), unsupported);
    assert_eq!(violation_after(REMOTE, |_, plan| handoff(plan).kind = HandoffKind::Replicate), unsupported);
    assert_eq!(violation_after(FETCH, |_, plan| handoff(plan).kind = HandoffKind::RemotePrefill), unsupported);
    assert_eq!(violation_after(FETCH, |_, plan| handoff(plan).blocks = None), unsupported, "a replicate has a length");
    assert_eq!(violation_after(REMOTE, |_, plan| handoff(plan).blocks = Some(Blocks(1))), unsupported);
}

#[test]
fn handoff_joins_the_legs() {
    let apart = PlanViolation::HandoffApart;
    assert_eq!(violation_after(FETCH, |_, plan| handoff(plan).target.worker = id("x")), apart(id("b")));
    assert_eq!(violation_after(FETCH, |_, plan| handoff(plan).target.rank = DpRank(1)), apart(id("b")));
    assert_eq!(violation_after(REMOTE, |_, plan| handoff(plan).source.worker = id("x")), apart(id("d")));
    assert_eq!(violation_after(REMOTE, |_, plan| handoff(plan).target.worker = id("p")), apart(id("d")));
    assert_eq!(violation_after(REMOTE, |_, plan| prefill_at(plan, "d")), PlanViolation::ToItself(id("d")));
}

#[test]
fn leg_tokens_sum_to_the_prompt_and_a_pulling_leg_computes_none() {
    let one_more = |leg: &mut Leg| leg.computed_tokens += Tokens(1);
    let answer = |plan: &mut Plan, change: fn(&mut Leg)| change(&mut plan.sequence.answer);
    assert_eq!(violation_after("worker a hybrid", |_, plan| answer(plan, one_more)), PlanViolation::TokenSum(id("a")));
    assert_eq!(violation_after(FETCH, |_, plan| answer(plan, one_more)), PlanViolation::TokenSum(id("b")));
    assert_eq!(violation_after(REMOTE, |_, plan| one_more(prefill(plan))), PlanViolation::TokenSum(id("p")));
    assert_eq!(violation_after(REMOTE, |_, plan| answer(plan, one_more)), PlanViolation::TokenSum(id("d")));
    let wrap = |leg: &mut Leg| (leg.cached_tokens, leg.computed_tokens) = (Tokens(u64::MAX), Tokens(1_601));
    assert_eq!(violation_after("worker a hybrid", |_, plan| answer(plan, wrap)), PlanViolation::TokenSum(id("a")));
}

#[test]
fn sequence_is_read_from_json_as_it_was_written() {
    for scene in [FETCH, REMOTE, "worker a hybrid"] {
        let sequence = PlanningScene::read(scene).plan().plan.sequence;
        let json = serde_json::to_string(&sequence).unwrap();
        assert_eq!(serde_json::from_str::<LegSequence>(&json).unwrap(), sequence, "{json}");
    }
    let leg = json!({"role": "serve", "worker": id("a"), "rank": 0, "cached_tokens": 16, "computed_tokens": 84});
    let at = |name| json!({"worker": id(name), "rank": 0});
    let handoff = json!({"kind": "replicate", "source": at("b"), "target": at("a"), "blocks": 1, "bytes": 2});
    let read = |parts: Vec<Value>| serde_json::from_value::<LegSequence>(parts.into());
    let (leg, handoff) = (json!({"leg": leg}), json!({"handoff": handoff}));
    let parts = vec![handoff.clone(), leg.clone()];
    assert_eq!(serde_json::to_value(read(parts.clone()).unwrap()).unwrap(), Value::from(parts));
    let problem = |parts| read(parts).unwrap_err().to_string();
    assert_eq!(problem(vec![]), "a plan ends with the leg that answers");
    assert_eq!(problem(vec![leg.clone(), handoff]), "a plan ends with the leg that answers");
    assert_eq!(problem(vec![leg; 4]), "4 parts are more than the 3 that a plan may have");
}

#[test]
fn request_may_forbid_every_handoff() {
    let bar = RequestTransferBlocker::SeveralChoices;
    for scene in [FETCH, REMOTE] {
        let refusal = violation_after(scene, |scene, _| scene.ask.transfers = TransferPermission::Forbidden(bar));
        assert_eq!(refusal, PlanViolation::TransferForbidden(bar));
    }
}

#[test]
fn kv_moves_only_inside_a_fabric() {
    assert_eq!(violation_after(FETCH, |_, plan| replicate(plan, "x", 99)), PlanViolation::NoFabric(id("x"), id("b")));
    assert_eq!(violation_after(REMOTE, |_, plan| prefill_at(plan, "x")), PlanViolation::NoFabric(id("x"), id("d")));
    assert_eq!(violation_after(REMOTE, |s, _| s.workers[1].link = None), PlanViolation::NoFabric(id("p"), id("d")));
}

#[test]
fn handoff_over_a_disabled_link_is_illegal() {
    let bar = |scene: &mut PlanningScene, from, to| scene.barred.push(DirectedLink { from: id(from), to: id(to) });
    assert_eq!(violation_after(FETCH, |scene, _| bar(scene, "a", "b")), PlanViolation::DisabledLink(id("a"), id("b")));
    assert_eq!(violation_after(REMOTE, |scene, _| bar(scene, "p", "d")), PlanViolation::DisabledLink(id("p"), id("d")));
}

#[test]
fn replicate_requires_aligned_sealed_blocks_held_by_the_source() {
    assert_eq!(violation_after(FETCH, |_, plan| replicate(plan, "b", 99)), PlanViolation::ToItself(id("b")));
    assert_eq!(violation_after(FETCH, |_, plan| replicate(plan, "a", 0)), PlanViolation::NotSealed(Blocks(0)));
    assert_eq!(violation_after(FETCH, |_, plan| replicate(plan, "a", 100)), PlanViolation::NotSealed(Blocks(100)));
    assert_eq!(violation_after(FETCH, |s, _| s.session.sealed = Blocks(98)), PlanViolation::NotSealed(Blocks(99)));
    let whole = violation_after(FETCH, |scene, plan| {
        scene.session.sealed = Blocks(100);
        scene.overlaps[0].blocks = Blocks(100);
        replicate(plan, "a", 100);
    });
    assert_eq!(whole, PlanViolation::NotSealed(Blocks(100)), "the last token is computed where the answer is");
    assert_eq!(violation_after(FETCH, |s, _| s.overlaps.clear()), PlanViolation::BlocksNotHeld(id("a")));
    assert_eq!(
        violation_after(FETCH, |s, _| s.workers[0].capacity.block = Tokens(32)),
        PlanViolation::Unaligned(Blocks(99))
    );
    assert_eq!(
        violation_after(FETCH, |s, _| s.workers[1].capacity.block = Tokens(32)),
        PlanViolation::Unaligned(Blocks(99))
    );
    assert_eq!(violation_after(FETCH, |s, _| s.excluded.push(id("a"))), PlanViolation::Excluded(id("a")));
}

#[test]
fn action_label_matches_the_legs() {
    let wrong = |scene: &str, action| {
        assert_eq!(violation_after(scene, |_, p| p.action = action), PlanViolation::Mislabelled(action))
    };
    for action in [Action::ArtifactFetch, Action::RemotePrefill, Action::StateMigration] {
        wrong("worker a hybrid", action);
    }
    for action in [Action::ColocatedPrefill, Action::DecodeContinuation, Action::RemotePrefill] {
        wrong(FETCH, action);
    }
    for action in [Action::ColocatedPrefill, Action::TailRecompute, Action::ArtifactFetch, Action::StateMigration] {
        wrong(REMOTE, action);
    }
    let borrowed = violation_after(FETCH, |_, plan| plan.ownership = OwnershipEffect::ReadReplica);
    assert_eq!(borrowed, PlanViolation::Mislabelled(Action::StateMigration), "a migration moves the ownership");
    let off = violation_after(FETCH, |scene, _| scene.policy.disabled_actions.push(Action::StateMigration));
    assert_eq!(off, PlanViolation::Disabled(Action::StateMigration));
}

#[test]
fn ownership_claim_matches_the_session_owner() {
    let owned = "session owner=a sealed=99\n worker a hybrid holds=99";
    for ownership in [OwnershipEffect::Claim, OwnershipEffect::ReadReplica] {
        assert_eq!(violation_after(owned, |_, plan| plan.ownership = ownership), PlanViolation::WrongClaim);
    }
    assert_eq!(violation_after(owned, |s, _| s.session.owner = None), PlanViolation::WrongClaim);
    assert_eq!(
        violation_after("worker a hybrid", |_, plan| plan.ownership = OwnershipEffect::Keep),
        PlanViolation::WrongClaim
    );
    assert_eq!(
        violation_after("worker a hybrid", |_, plan| plan.ownership = OwnershipEffect::ReadReplica),
        PlanViolation::WrongClaim
    );
    let newer = Epoch { generation: 0, index: 8, position: 0 };
    assert_eq!(
        violation_after(FETCH, |s, _| s.session.epoch = newer),
        PlanViolation::WrongClaim,
        "decided on an older epoch"
    );
    let restarted = violation_after(owned, |s, _| s.workers[0].incarnation.0 += 1);
    assert_eq!(restarted, PlanViolation::WrongClaim, "another life of the owner owns nothing");
}

#[test]
fn plan_violation_message_names_worker_and_cause() {
    assert_eq!(
        PlanViolation::TransferForbidden(RequestTransferBlocker::Endpoint).to_string(),
        "the request forbids transfers: Endpoint"
    );
    assert!(PlanViolation::NoFabric(id("a"), id("b")).to_string().contains("share no fabric"));
    assert_eq!(PlanViolation::Mislabelled(Action::ArtifactFetch).to_string(), "artifact_fetch is not what the legs do");
}
