use vocabulary::{DpRank, Epoch, Incarnation, Owner, SessionId, WorkerId};

use super::*;
use crate::history::{Answer, Asked, At, Kept, Seat, Sighting};

const SUBJECT: SessionId = SessionId(7);
const A: Owner = Owner { worker: WorkerId(1), incarnation: Incarnation(1), rank: DpRank(0) };
const B: Owner = Owner { worker: WorkerId(2), incarnation: Incarnation(1), rank: DpRank(0) };

fn at(index: u64) -> Epoch {
    Epoch { generation: 0, index, position: 0 }
}

/// An attempt of a client of its own, from `when` to ten later.
fn op(when: u64, asked: Asked, answer: Answer) -> Operation {
    let (invoked, completed) = (At(when), At(when + 10));
    let client = u32::try_from(when).unwrap();
    Operation { client, seat: Seat(1), subject: SUBJECT, asked, invoked, completed, answer, revision: None }
}

fn found(owner: Option<Owner>, index: u64) -> Answer {
    Answer::Found(Holding { owner, epoch: at(index) })
}

/// The broken promises of a history, without a last state.
fn promises(operations: &[Operation]) -> Vec<&'static str> {
    broken_with(operations, &[], None)
}

fn broken_with(operations: &[Operation], sightings: &[Sighting], last: Option<Holding>) -> Vec<&'static str> {
    let kept = Kept { operations: operations.to_vec(), sightings: sightings.to_vec() };
    let finals = last.map(|last| (SUBJECT, last)).into_iter().collect();
    // Whether there is one order of all has tests of its own.
    let judged = history(&kept, &finals).broken.into_iter().map(|broken| broken.promise);
    judged.filter(|promise| *promise != "all operations on a session have one order").collect()
}

const NONE: [&str; 0] = [];

#[test]
fn an_honest_history_passes() {
    let operations = [
        op(0, Asked::Claim(A), Answer::Granted(at(5))),
        op(20, Asked::Claim(B), Answer::Refused),
        op(40, Asked::Read, found(Some(A), 5)),
        op(60, Asked::Migrate { to: B, seen: at(5) }, Answer::Granted(at(9))),
        op(80, Asked::Release { owner: B, seen: at(9) }, Answer::Released),
        op(100, Asked::Read, found(None, 11)),
        op(120, Asked::Claim(A), Answer::Unknown),
        op(140, Asked::Claim(A), Answer::Granted(at(14))),
    ];
    assert_eq!(broken_with(&operations, &[], Some(Holding { owner: Some(A), epoch: at(14) })), NONE);
}

#[test]
fn two_owners_of_one_epoch_are_found() {
    let operations = [op(0, Asked::Claim(A), Answer::Granted(at(5))), op(5, Asked::Claim(B), Answer::Granted(at(5)))];
    assert_eq!(promises(&operations), ["one owner per epoch"]);
    let operations = [op(0, Asked::Claim(A), Answer::Granted(at(5))), op(5, Asked::Read, found(Some(B), 5))];
    assert_eq!(promises(&operations), ["one owner per epoch"]);
}

#[test]
fn a_claim_over_a_living_owner_is_found() {
    let operations = [op(0, Asked::Claim(A), Answer::Granted(at(5))), op(20, Asked::Claim(B), Answer::Granted(at(9)))];
    assert_eq!(promises(&operations), ["no owner is replaced while it owns"]);
}

#[test]
fn a_claim_is_explained_by_an_ended_lease_but_not_by_one_that_was_held_throughout() {
    let operations = [op(0, Asked::Claim(A), Answer::Granted(at(5))), op(20, Asked::Claim(B), Answer::Granted(at(9)))];
    let lease = |granted, is_live, revision| Sighting { worker: A.worker, granted: at(granted), is_live, revision };
    assert_eq!(broken_with(&operations, &[lease(1, false, 8)], None), NONE);
    assert_eq!(broken_with(&operations, &[lease(1, true, 4), lease(8, true, 20)], None), NONE);
    let held = [lease(1, true, 12), lease(15, true, 20)];
    assert_eq!(broken_with(&operations, &held, None), ["no owner is replaced while it owns"]);
}

#[test]
fn a_claim_is_explained_by_a_release_of_that_grant_only() {
    let release = |seen| op(12, Asked::Release { owner: A, seen: at(seen) }, Answer::Unknown);
    let claims = [op(0, Asked::Claim(A), Answer::Granted(at(5))), op(30, Asked::Claim(B), Answer::Granted(at(9)))];
    assert_eq!(promises(&[claims[0], release(5), claims[1]]), NONE);
    assert_eq!(promises(&[claims[0], release(3), claims[1]]), ["no owner is replaced while it owns"]);
    let late = op(60, Asked::Release { owner: A, seen: at(5) }, Answer::Unknown);
    assert_eq!(promises(&[claims[0], claims[1], late]), ["no owner is replaced while it owns"]);
}

#[test]
fn a_migration_on_an_old_epoch_is_found() {
    let operations = [
        op(0, Asked::Claim(A), Answer::Granted(at(5))),
        op(20, Asked::Migrate { to: B, seen: at(2) }, Answer::Granted(at(9))),
    ];
    assert_eq!(promises(&operations), ["no owner is replaced while it owns"]);
}

#[test]
fn a_claim_that_finds_what_a_migration_has_just_made_is_explained_by_it() {
    let claimed = op(0, Asked::Claim(A), Answer::Granted(at(5)));
    let migrated = op(20, Asked::Migrate { to: B, seen: at(5) }, Answer::Granted(at(9)));
    let found_it = op(22, Asked::Claim(B), Answer::Granted(at(9)));
    assert_eq!(promises(&[claimed, found_it, migrated]), NONE);
    assert_eq!(promises(&[claimed, found_it]), ["no owner is replaced while it owns"]);
}

#[test]
fn an_epoch_that_falls_in_real_time_is_found() {
    let operations = [op(0, Asked::Claim(A), Answer::Granted(at(9))), op(20, Asked::Claim(A), Answer::Granted(at(5)))];
    assert_eq!(promises(&operations), ["epochs rise with real time"]);
    let concurrent = [op(0, Asked::Claim(A), Answer::Granted(at(9))), op(5, Asked::Claim(A), Answer::Granted(at(5)))];
    assert_eq!(promises(&concurrent), NONE);
}

#[test]
fn a_stale_read_is_found() {
    let promise = "a linearizable read is never older than what was answered before it was asked";
    let granted = op(0, Asked::Claim(A), Answer::Granted(at(9)));
    assert_eq!(promises(&[granted, op(20, Asked::Read, found(None, 4))]), [promise]);
    assert_eq!(promises(&[granted, op(5, Asked::Read, found(None, 4))]), NONE);
    let newer = op(20, Asked::Read, found(Some(A), 9));
    assert_eq!(promises(&[newer, op(40, Asked::Read, found(None, 4))]), [promise]);
    let released = op(20, Asked::Release { owner: A, seen: at(9) }, Answer::Released);
    assert_eq!(promises(&[granted, released, op(40, Asked::Read, found(Some(A), 9))]), [promise]);
    assert_eq!(promises(&[granted, released, op(40, Asked::Read, found(None, 10))]), NONE);
}

#[test]
fn a_lost_claim_is_found() {
    let granted = op(0, Asked::Claim(A), Answer::Granted(at(9)));
    let last = |owner, index| Some(Holding { owner, epoch: at(index) });
    assert_eq!(broken_with(&[granted], &[], last(Some(A), 9)), NONE);
    let lost = broken_with(&[granted], &[], last(None, 4));
    assert!(lost.contains(&"nothing acknowledged is lost"), "{lost:?}");
    let replaced = broken_with(&[granted], &[], last(Some(B), 12));
    assert_eq!(replaced, ["nothing acknowledged is lost"], "nobody asked for B");
    let asked = op(20, Asked::Migrate { to: B, seen: at(9) }, Answer::Unknown);
    assert_eq!(broken_with(&[granted, asked], &[], last(Some(B), 12)), NONE);
}

#[test]
fn a_lost_release_is_found() {
    let operations = [
        op(0, Asked::Claim(A), Answer::Granted(at(9))),
        op(20, Asked::Release { owner: A, seen: at(9) }, Answer::Released),
    ];
    let last = |owner, index| Some(Holding { owner, epoch: at(index) });
    assert_eq!(broken_with(&operations, &[], last(None, 11)), NONE);
    assert_eq!(broken_with(&operations, &[], last(Some(A), 9)), ["nothing acknowledged is lost"]);
}

fn change(revision: u64, key: SessionId) -> Change {
    Change { revision, key: key.to_string(), op: "put".into() }
}

fn watched(changes: &[(u64, u128)]) -> Watched {
    let changes = changes.iter().map(|(revision, key)| change(*revision, SessionId(*key))).collect();
    Watched { from: 1, changes, ..Watched::default() }
}

fn only(broken: Vec<Broken>) -> Vec<&'static str> {
    broken.into_iter().map(|broken| broken.promise).collect()
}

#[test]
fn a_watch_out_of_order_or_told_twice_is_found() {
    assert_eq!(only(watched(&[(3, 1), (4, 1), (4, 2)]).ordered()), NONE);
    assert_eq!(only(watched(&[(4, 1), (3, 1)]).ordered()), ["a watch is ordered"]);
    assert_eq!(only(watched(&[(3, 1), (3, 2), (3, 1)]).ordered()), ["a watch tells each change once"]);
}

#[test]
fn a_watch_that_misses_an_acknowledged_grant_is_found() {
    let granted = op(0, Asked::Claim(A), Answer::Granted(at(5)));
    assert_eq!(only(watched(&[(5, SUBJECT.0), (6, 1)]).gapless(&[granted], 0)), NONE);
    assert_eq!(only(watched(&[(4, 1)]).gapless(&[granted], 0)), NONE, "5 is not due yet");
    let mut skipping = watched(&[(4, 1)]);
    skipping.skip_to(9);
    assert_eq!((skipping.next(), only(skipping.gapless(&[granted], 20))), (9, Vec::new()), "nobody kept 5");
    assert_eq!(only(watched(&[(4, 1), (6, 1)]).gapless(&[granted], 0)), ["a watch has no gap"]);
    assert_eq!(only(watched(&[(4, 1)]).gapless(&[granted], 5)), ["a watch has no gap"], "it should be there by now");
}

#[test]
fn two_watches_that_differ_are_found() {
    let (one, two) = (watched(&[(3, 1), (4, 1), (5, 1)]), watched(&[(3, 1), (5, 1), (6, 1)]));
    assert_eq!(only(one.equal(&one)), NONE);
    assert_eq!(only(one.equal(&two)), ["all watches tell the same"]);
}

#[test]
fn unequal_states_at_one_index_are_found() {
    let state = |seat, applied, hash: &str| NodeState { seat: Seat(seat), applied, hash: hash.into() };
    assert_eq!(only(equal_states(&[state(1, 5, "x"), state(2, 5, "x"), state(3, 6, "y")])), NONE);
    let promise = "state hashes are equal at equal applied index";
    assert_eq!(only(equal_states(&[state(1, 5, "x"), state(2, 5, "y")])), [promise]);
}

#[test]
fn a_stream_that_ends_in_silence_is_found() {
    let ended = |end| Streamed { end, at: At(1) };
    assert_eq!(only(streams(&[ended(StreamEnd::Whole), ended(StreamEnd::Error), ended(StreamEnd::Cut)])), NONE);
    assert_eq!(
        only(streams(&[ended(StreamEnd::Whole), ended(StreamEnd::Silent)])),
        ["every stream ends with a reason"]
    );
}

/// The broken promises of a backup up to an entry in which the session is like that.
fn backup(operations: &[Operation], last: Holding, applied: u64) -> Vec<&'static str> {
    let kept = Kept { operations: operations.to_vec(), sightings: Vec::new() };
    backed_up(&kept, &Finals::from([(SUBJECT, last)]), applied).iter().map(|broken| broken.promise).collect()
}

#[test]
fn a_backup_must_hold_what_was_decided_before_its_last_entry_and_nothing_else() {
    let claimed = op(10, Asked::Claim(A), Answer::Granted(at(5)));
    let moved = op(30, Asked::Migrate { to: B, seen: at(5) }, Answer::Granted(at(9)));
    let (of_a, of_b) = (Holding { owner: Some(A), epoch: at(5) }, Holding { owner: Some(B), epoch: at(9) });
    assert!(backup(&[claimed, moved], of_a, 8).is_empty(), "the move came later");
    assert!(backup(&[claimed, moved], of_b, 9).is_empty());
    assert_eq!(backup(&[claimed, moved], of_a, 9), ["nothing acknowledged is lost"]);
    assert_eq!(backup(&[claimed, moved], of_b, 8)[0], "a backup ends where it says");
    let kept = Kept { operations: vec![claimed], sightings: Vec::new() };
    assert_eq!(backed_up(&kept, &Finals::new(), 9)[0].promise, "a backup holds every session");
    assert_eq!(newest(&[moved, claimed]), 9);
}

#[test]
fn a_release_that_may_be_later_than_a_backup_need_not_be_in_it() {
    let claimed = op(10, Asked::Claim(A), Answer::Granted(at(5)));
    let released =
        |revision| Operation { revision, ..op(30, Asked::Release { owner: A, seen: at(5) }, Answer::Released) };
    let (held, free) = (Holding { owner: Some(A), epoch: at(5) }, Holding { owner: None, epoch: at(7) });
    assert!(backup(&[claimed, released(Some(7))], held, 6).is_empty());
    assert!(backup(&[claimed, released(Some(7))], free, 7).is_empty());
    assert_eq!(backup(&[claimed, released(Some(7))], held, 7), ["nothing acknowledged is lost"]);
}

#[test]
fn what_a_watch_told_before_it_was_checked_must_not_come_again() {
    let change = |revision: u64| Change { revision, key: "s-1".into(), op: "upserted".into() };
    let mut watched = Watched { from: 3, changes: vec![change(3), change(5)], ..Watched::default() };
    assert!(watched.ordered().is_empty());
    watched.forget(4);
    assert_eq!((watched.from, watched.forgotten, watched.next()), (5, 1, 6));
    watched.forget(9);
    assert_eq!((watched.next(), watched.changes.len()), (10, 0));
    watched.changes.push(change(5));
    assert_eq!(watched.ordered()[0].promise, "a watch tells each change once");
}
