use serde_json::json;
use vocabulary::{DpRank, Incarnation};
use workers_shim::dialect::Answer;

use super::*;

fn returned(tokens: u64, until: Instant) -> Returned {
    let parameters = json!({
        "do_remote_prefill": false, "do_remote_decode": true, "remote_block_ids": [[1, 2]], "remote_engine_id": "e",
        "remote_request_id": "cmpl-1", "remote_host": "10.0.0.7", "remote_port": 5600, "remote_num_tokens": tokens,
    });
    let answer = Bytes::from(json!({ "kv_transfer_params": parameters }).to_string());
    let readback = Answer::read(&answer).unwrap().readback.unwrap();
    let keeper = Owner { worker: WorkerId(1), incarnation: Incarnation(1), rank: DpRank(0) };
    Returned { readback, keeper, begins: PrefixId(7), until }
}

#[test]
fn what_is_kept_is_given_once_and_not_when_it_is_too_old() {
    let (all, now) = (Readbacks::default(), Instant::now());
    all.keep(SessionId(1), returned(9, now + KEPT_FOR), now);
    assert!(all.take(SessionId(2)).is_none());
    assert_eq!(all.take(SessionId(1)).unwrap().readback.tokens(), Tokens(9));
    assert!(all.take(SessionId(1)).is_none(), "it is used up");
    all.keep(SessionId(1), returned(9, now + KEPT_FOR), now);
    let old = all.take(SessionId(1)).unwrap();
    assert!(old.is_fresh(now) && !old.is_fresh(now + KEPT_FOR));
    assert!(all.take(SessionId(1)).is_none(), "and is gone");
}

#[test]
fn a_sessions_newest_parameters_take_the_place_of_its_last_ones() {
    let (all, now) = (Readbacks::default(), Instant::now());
    all.keep(SessionId(1), returned(9, now + KEPT_FOR), now);
    all.keep(SessionId(1), returned(40, now + KEPT_FOR), now);
    assert_eq!(all.take(SessionId(1)).unwrap().readback.tokens(), Tokens(40));
}

#[test]
fn those_that_expire_first_go_when_there_are_too_many() {
    let (all, now) = (Readbacks::default(), Instant::now());
    let later = |at: usize| now + KEPT_FOR + Duration::from_millis(at as u64);
    for session in 0..=MOST {
        all.keep(SessionId(session as u128), returned(9, later(session)), now);
    }
    assert_eq!(all.0.lock().len(), MOST);
    assert!(all.take(SessionId(0)).is_none());
    assert!(all.take(SessionId(1)).is_some());
    let after = later(MOST / 2);
    all.keep(SessionId(u128::MAX), returned(9, later(2 * MOST)), after);
    all.keep(SessionId(u128::MAX - 1), returned(9, later(2 * MOST)), after);
    assert!(all.0.lock().len() <= MOST / 2 + 2, "the expired ones go all at once");
}

#[test]
fn nothing_of_the_parameters_is_printed() {
    let printed = format!("{:?}", returned(9, Instant::now()));
    assert!(!printed.contains("10.0.0.7") && !printed.contains("cmpl-1"), "{printed}");
}

#[test]
fn a_name_is_that_of_all_tokens_in_their_order_and_of_their_namespace() {
    let named = name(PrefixId(1), &[1, 2, 3]);
    assert!(named.is_some());
    for (root, ids) in [(1, vec![1, 2]), (1, vec![1, 3, 2]), (2, vec![1, 2, 3]), (1, vec![1, 2, 3, 4])] {
        assert_ne!(name(PrefixId(root), &ids), named);
    }
    assert_eq!(name(PrefixId(1), &[]), None);
}
