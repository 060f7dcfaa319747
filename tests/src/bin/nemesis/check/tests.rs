use vocabulary::{DpRank, Epoch, Incarnation, Owner, SessionId, WorkerId};

use super::*;
use crate::history::{
    ClientOperation, HistoryRecords, LeaseSighting, MemberSlot, OwnershipReply, OwnershipRequest, RunInstant,
    SessionOwner,
};

const SUBJECT: SessionId = SessionId(7);
const A: Owner = Owner { worker: WorkerId(1), incarnation: Incarnation(1), rank: DpRank(0) };
const B: Owner = Owner { worker: WorkerId(2), incarnation: Incarnation(1), rank: DpRank(0) };

fn at(index: u64) -> Epoch {
    Epoch { generation: 0, index, position: 0 }
}

/// An operation of a separate client, from `when` to `when + 10`.
fn op(when: u64, request: OwnershipRequest, reply: OwnershipReply) -> ClientOperation {
    let (invoked, completed) = (RunInstant(when), RunInstant(when + 10));
    let client = u32::try_from(when).unwrap();
    ClientOperation {
        client,
        seat: MemberSlot(1),
        subject: SUBJECT,
        asked: request,
        invoked,
        completed,
        answer: reply,
        revision: None,
    }
}

fn found(owner: Option<Owner>, index: u64) -> OwnershipReply {
    OwnershipReply::Found(SessionOwner { owner, epoch: at(index) })
}

/// Returns the violated guarantees of a history without a final state.
fn violations(operations: &[ClientOperation]) -> Vec<&'static str> {
    violations_with(operations, &[], None)
}

fn violations_with(
    operations: &[ClientOperation],
    sightings: &[LeaseSighting],
    holder: Option<SessionOwner>,
) -> Vec<&'static str> {
    let history =
        HistoryRecords { operations: operations.to_vec(), sightings: sightings.to_vec(), ..Default::default() };
    let finals = holder.map(|holder| (SUBJECT, holder)).into_iter().collect();
    // Linearizability is tested separately.
    let judged = check_history(&history, &finals).broken.into_iter().map(|broken| broken.guarantee);
    judged.filter(|promise| *promise != "all operations on a session have one order").collect()
}

const NO_VIOLATIONS: [&str; 0] = [];

#[test]
fn a_correct_history_passes() {
    let operations = [
        op(0, OwnershipRequest::Claim(A), OwnershipReply::Granted(at(5))),
        op(20, OwnershipRequest::Claim(B), OwnershipReply::Refused),
        op(40, OwnershipRequest::Read, found(Some(A), 5)),
        op(60, OwnershipRequest::Migrate { to: B, seen: at(5) }, OwnershipReply::Granted(at(9))),
        op(80, OwnershipRequest::Release { owner: B, seen: at(9) }, OwnershipReply::Released),
        op(100, OwnershipRequest::Read, found(None, 11)),
        op(120, OwnershipRequest::Claim(A), OwnershipReply::Unknown),
        op(140, OwnershipRequest::Claim(A), OwnershipReply::Granted(at(14))),
    ];
    assert_eq!(violations_with(&operations, &[], Some(SessionOwner { owner: Some(A), epoch: at(14) })), NO_VIOLATIONS);
}

#[test]
fn two_owners_of_one_epoch_are_a_violation() {
    let operations = [
        op(0, OwnershipRequest::Claim(A), OwnershipReply::Granted(at(5))),
        op(5, OwnershipRequest::Claim(B), OwnershipReply::Granted(at(5))),
    ];
    assert_eq!(violations(&operations), ["one owner per epoch"]);
    let operations = [
        op(0, OwnershipRequest::Claim(A), OwnershipReply::Granted(at(5))),
        op(5, OwnershipRequest::Read, found(Some(B), 5)),
    ];
    assert_eq!(violations(&operations), ["one owner per epoch"]);
}

#[test]
fn a_claim_over_a_live_owner_is_a_violation() {
    let operations = [
        op(0, OwnershipRequest::Claim(A), OwnershipReply::Granted(at(5))),
        op(20, OwnershipRequest::Claim(B), OwnershipReply::Granted(at(9))),
    ];
    assert_eq!(violations(&operations), ["no owner is replaced while it owns"]);
}

#[test]
fn a_claim_after_an_ended_lease_passes_and_over_a_held_lease_fails() {
    let operations = [
        op(0, OwnershipRequest::Claim(A), OwnershipReply::Granted(at(5))),
        op(20, OwnershipRequest::Claim(B), OwnershipReply::Granted(at(9))),
    ];
    let lease =
        |granted, is_live, revision| LeaseSighting { worker: A.worker, granted: at(granted), is_live, revision };
    assert_eq!(violations_with(&operations, &[lease(1, false, 8)], None), NO_VIOLATIONS);
    assert_eq!(violations_with(&operations, &[lease(1, true, 4), lease(8, true, 20)], None), NO_VIOLATIONS);
    let held = [lease(1, true, 12), lease(15, true, 20)];
    assert_eq!(violations_with(&operations, &held, None), ["no owner is replaced while it owns"]);
}

#[test]
fn only_a_release_of_the_same_grant_explains_a_claim() {
    let release = |seen| op(12, OwnershipRequest::Release { owner: A, seen: at(seen) }, OwnershipReply::Unknown);
    let claims = [
        op(0, OwnershipRequest::Claim(A), OwnershipReply::Granted(at(5))),
        op(30, OwnershipRequest::Claim(B), OwnershipReply::Granted(at(9))),
    ];
    assert_eq!(violations(&[claims[0], release(5), claims[1]]), NO_VIOLATIONS);
    assert_eq!(violations(&[claims[0], release(3), claims[1]]), ["no owner is replaced while it owns"]);
    let late = op(60, OwnershipRequest::Release { owner: A, seen: at(5) }, OwnershipReply::Unknown);
    assert_eq!(violations(&[claims[0], claims[1], late]), ["no owner is replaced while it owns"]);
}

#[test]
fn a_migration_from_an_old_epoch_is_a_violation() {
    let operations = [
        op(0, OwnershipRequest::Claim(A), OwnershipReply::Granted(at(5))),
        op(20, OwnershipRequest::Migrate { to: B, seen: at(2) }, OwnershipReply::Granted(at(9))),
    ];
    assert_eq!(violations(&operations), ["no owner is replaced while it owns"]);
}

#[test]
fn a_claim_that_meets_a_concurrent_migration_of_its_owner_passes() {
    let claimed = op(0, OwnershipRequest::Claim(A), OwnershipReply::Granted(at(5)));
    let migrated = op(20, OwnershipRequest::Migrate { to: B, seen: at(5) }, OwnershipReply::Granted(at(9)));
    let found_it = op(22, OwnershipRequest::Claim(B), OwnershipReply::Granted(at(9)));
    assert_eq!(violations(&[claimed, found_it, migrated]), NO_VIOLATIONS);
    assert_eq!(violations(&[claimed, found_it]), ["no owner is replaced while it owns"]);
}

#[test]
fn an_epoch_that_falls_in_real_time_is_a_violation() {
    let operations = [
        op(0, OwnershipRequest::Claim(A), OwnershipReply::Granted(at(9))),
        op(20, OwnershipRequest::Claim(A), OwnershipReply::Granted(at(5))),
    ];
    assert_eq!(violations(&operations), ["epochs rise with real time"]);
    let concurrent = [
        op(0, OwnershipRequest::Claim(A), OwnershipReply::Granted(at(9))),
        op(5, OwnershipRequest::Claim(A), OwnershipReply::Granted(at(5))),
    ];
    assert_eq!(violations(&concurrent), NO_VIOLATIONS);
}

#[test]
fn a_stale_read_is_a_violation() {
    let promise = "a linearizable read is never older than what was answered before it was asked";
    let granted = op(0, OwnershipRequest::Claim(A), OwnershipReply::Granted(at(9)));
    assert_eq!(violations(&[granted, op(20, OwnershipRequest::Read, found(None, 4))]), [promise]);
    assert_eq!(violations(&[granted, op(5, OwnershipRequest::Read, found(None, 4))]), NO_VIOLATIONS);
    let newer = op(20, OwnershipRequest::Read, found(Some(A), 9));
    assert_eq!(violations(&[newer, op(40, OwnershipRequest::Read, found(None, 4))]), [promise]);
    let released = op(20, OwnershipRequest::Release { owner: A, seen: at(9) }, OwnershipReply::Released);
    assert_eq!(violations(&[granted, released, op(40, OwnershipRequest::Read, found(Some(A), 9))]), [promise]);
    assert_eq!(violations(&[granted, released, op(40, OwnershipRequest::Read, found(None, 10))]), NO_VIOLATIONS);
}

#[test]
fn a_lost_claim_is_a_violation() {
    let granted = op(0, OwnershipRequest::Claim(A), OwnershipReply::Granted(at(9)));
    let last = |owner, index| Some(SessionOwner { owner, epoch: at(index) });
    assert_eq!(violations_with(&[granted], &[], last(Some(A), 9)), NO_VIOLATIONS);
    let lost = violations_with(&[granted], &[], last(None, 4));
    assert!(lost.contains(&"nothing acknowledged is lost"), "{lost:?}");
    let replaced = violations_with(&[granted], &[], last(Some(B), 12));
    assert_eq!(replaced, ["nothing acknowledged is lost"], "nobody asked for B");
    let asked = op(20, OwnershipRequest::Migrate { to: B, seen: at(9) }, OwnershipReply::Unknown);
    assert_eq!(violations_with(&[granted, asked], &[], last(Some(B), 12)), NO_VIOLATIONS);
}

#[test]
fn a_lost_release_is_a_violation() {
    let operations = [
        op(0, OwnershipRequest::Claim(A), OwnershipReply::Granted(at(9))),
        op(20, OwnershipRequest::Release { owner: A, seen: at(9) }, OwnershipReply::Released),
    ];
    let last = |owner, index| Some(SessionOwner { owner, epoch: at(index) });
    assert_eq!(violations_with(&operations, &[], last(None, 11)), NO_VIOLATIONS);
    assert_eq!(violations_with(&operations, &[], last(Some(A), 9)), ["nothing acknowledged is lost"]);
}

fn change(revision: u64, key: SessionId) -> WatchedChange {
    WatchedChange { revision, key: key.to_string(), op: "put".into() }
}

fn watched(changes: &[(u64, u128)]) -> WatcherHistory {
    let changes = changes.iter().map(|(revision, key)| change(*revision, SessionId(*key))).collect();
    WatcherHistory { from: 1, changes, ..WatcherHistory::default() }
}

fn violated_guarantees(broken: Vec<GuaranteeViolation>) -> Vec<&'static str> {
    broken.into_iter().map(|broken| broken.guarantee).collect()
}

#[test]
fn an_out_of_order_or_repeated_watch_event_is_a_violation() {
    assert_eq!(violated_guarantees(watched(&[(3, 1), (4, 1), (4, 2)]).check_order()), NO_VIOLATIONS);
    assert_eq!(violated_guarantees(watched(&[(4, 1), (3, 1)]).check_order()), ["a watch is ordered"]);
    assert_eq!(
        violated_guarantees(watched(&[(3, 1), (3, 2), (3, 1)]).check_order()),
        ["a watch tells each change once"]
    );
}

#[test]
fn a_watch_that_misses_an_acknowledged_grant_is_a_violation() {
    let granted = op(0, OwnershipRequest::Claim(A), OwnershipReply::Granted(at(5)));
    assert_eq!(violated_guarantees(watched(&[(5, SUBJECT.0), (6, 1)]).check_no_gap(&[granted], 0)), NO_VIOLATIONS);
    assert_eq!(violated_guarantees(watched(&[(4, 1)]).check_no_gap(&[granted], 0)), NO_VIOLATIONS, "5 is not due yet");
    let mut skipping = watched(&[(4, 1)]);
    skipping.skip_to(9);
    assert_eq!(
        (skipping.next_revision(), violated_guarantees(skipping.check_no_gap(&[granted], 20))),
        (9, Vec::new()),
        "nobody kept 5"
    );
    assert_eq!(violated_guarantees(watched(&[(4, 1), (6, 1)]).check_no_gap(&[granted], 0)), ["a watch has no gap"]);
    assert_eq!(
        violated_guarantees(watched(&[(4, 1)]).check_no_gap(&[granted], 5)),
        ["a watch has no gap"],
        "it should be there by now"
    );
}

#[test]
fn two_watches_that_differ_are_a_violation() {
    let (one, two) = (watched(&[(3, 1), (4, 1), (5, 1)]), watched(&[(3, 1), (5, 1), (6, 1)]));
    assert_eq!(violated_guarantees(one.check_equal(&one)), NO_VIOLATIONS);
    assert_eq!(violated_guarantees(one.check_equal(&two)), ["all watches tell the same"]);
}

#[test]
fn unequal_states_at_one_index_are_a_violation() {
    let state = |seat, applied, hash: &str| NodeStateHash { seat: MemberSlot(seat), applied, hash: hash.into() };
    assert_eq!(
        violated_guarantees(check_equal_states(&[state(1, 5, "x"), state(2, 5, "x"), state(3, 6, "y")])),
        NO_VIOLATIONS
    );
    let promise = "state hashes are equal at equal applied index";
    assert_eq!(violated_guarantees(check_equal_states(&[state(1, 5, "x"), state(2, 5, "y")])), [promise]);
}

#[test]
fn a_stream_that_ends_silently_is_a_violation() {
    let ended = |end| StreamEnding { end, at: RunInstant(1) };
    assert_eq!(
        violated_guarantees(check_streams(&[
            ended(ResponseStreamEnd::Whole),
            ended(ResponseStreamEnd::Error),
            ended(ResponseStreamEnd::Cut)
        ])),
        NO_VIOLATIONS
    );
    assert_eq!(
        violated_guarantees(check_streams(&[ended(ResponseStreamEnd::Whole), ended(ResponseStreamEnd::Silent)])),
        ["every stream ends with a reason"]
    );
}

/// Returns the violations of a backup up to entry `applied` in which the session has this holder.
fn backup(operations: &[ClientOperation], holder: SessionOwner, applied: u64) -> Vec<&'static str> {
    let history = HistoryRecords { operations: operations.to_vec(), ..Default::default() };
    check_backup(&history, &FinalOwners::from([(SUBJECT, holder)]), applied)
        .iter()
        .map(|broken| broken.guarantee)
        .collect()
}

#[test]
fn a_backup_holds_exactly_the_decisions_before_its_last_entry() {
    let claimed = op(10, OwnershipRequest::Claim(A), OwnershipReply::Granted(at(5)));
    let moved = op(30, OwnershipRequest::Migrate { to: B, seen: at(5) }, OwnershipReply::Granted(at(9)));
    let (of_a, of_b) = (SessionOwner { owner: Some(A), epoch: at(5) }, SessionOwner { owner: Some(B), epoch: at(9) });
    assert!(backup(&[claimed, moved], of_a, 8).is_empty(), "the move came later");
    assert!(backup(&[claimed, moved], of_b, 9).is_empty());
    assert_eq!(backup(&[claimed, moved], of_a, 9), ["nothing acknowledged is lost"]);
    assert_eq!(backup(&[claimed, moved], of_b, 8)[0], "a backup ends where it says");
    let history = HistoryRecords { operations: vec![claimed], ..Default::default() };
    assert_eq!(check_backup(&history, &FinalOwners::new(), 9)[0].guarantee, "a backup holds every session");
    assert_eq!(newest_acknowledged(&[moved, claimed]), 9);
}

#[test]
fn a_backup_may_lack_a_release_that_came_later() {
    let claimed = op(10, OwnershipRequest::Claim(A), OwnershipReply::Granted(at(5)));
    let released = |revision| ClientOperation {
        revision,
        ..op(30, OwnershipRequest::Release { owner: A, seen: at(5) }, OwnershipReply::Released)
    };
    let (held, free) = (SessionOwner { owner: Some(A), epoch: at(5) }, SessionOwner { owner: None, epoch: at(7) });
    assert!(backup(&[claimed, released(Some(7))], held, 6).is_empty());
    assert!(backup(&[claimed, released(Some(7))], free, 7).is_empty());
    assert_eq!(backup(&[claimed, released(Some(7))], held, 7), ["nothing acknowledged is lost"]);
}

#[test]
fn a_watch_must_not_repeat_changes_that_were_already_checked() {
    let change = |revision: u64| WatchedChange { revision, key: "s-1".into(), op: "upserted".into() };
    let mut watched = WatcherHistory { from: 3, changes: vec![change(3), change(5)], ..WatcherHistory::default() };
    assert!(watched.check_order().is_empty());
    watched.forget_checked(4);
    assert_eq!((watched.from, watched.checked, watched.next_revision()), (5, 1, 6));
    watched.forget_checked(9);
    assert_eq!((watched.next_revision(), watched.changes.len()), (10, 0));
    watched.changes.push(change(5));
    assert_eq!(watched.check_order()[0].guarantee, "a watch tells each change once");
}
