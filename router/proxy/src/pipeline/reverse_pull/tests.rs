use serde_json::json;
use vocabulary::{DpRank, Incarnation};
use workers_shim::engine_api::AnswerSummary;

use super::*;

fn entry(tokens: u64, until: Instant) -> StoredReversePull {
    let parameters = json!({
        "do_remote_prefill": false, "do_remote_decode": true, "remote_block_ids": [[1, 2]], "remote_engine_id": "e",
        "remote_request_id": "cmpl-1", "remote_host": "10.0.0.7", "remote_port": 5600, "remote_num_tokens": tokens,
    });
    let answer = Bytes::from(json!({ "kv_transfer_params": parameters }).to_string());
    let readback = AnswerSummary::read(&answer).unwrap().reverse_pull.unwrap();
    let keeper = Owner { worker: WorkerId(1), incarnation: Incarnation(1), rank: DpRank(0) };
    StoredReversePull { params: readback, holder: keeper, content_id: PrefixId(7), expires_at: until }
}

#[test]
fn stored_parameters_are_taken_once_and_expire() {
    let (all, now) = (ReversePullStore::default(), Instant::now());
    all.insert(SessionId(1), entry(9, now + RETENTION), now);
    assert!(all.take(SessionId(2)).is_none());
    assert_eq!(all.take(SessionId(1)).unwrap().params.tokens(), Tokens(9));
    assert!(all.take(SessionId(1)).is_none(), "it is used up");
    all.insert(SessionId(1), entry(9, now + RETENTION), now);
    let old = all.take(SessionId(1)).unwrap();
    assert!(old.is_retained(now) && !old.is_retained(now + RETENTION));
    assert!(all.take(SessionId(1)).is_none(), "and is gone");
}

#[test]
fn newer_parameters_replace_those_of_the_same_session() {
    let (all, now) = (ReversePullStore::default(), Instant::now());
    all.insert(SessionId(1), entry(9, now + RETENTION), now);
    all.insert(SessionId(1), entry(40, now + RETENTION), now);
    assert_eq!(all.take(SessionId(1)).unwrap().params.tokens(), Tokens(40));
}

#[test]
fn the_first_to_expire_are_evicted_beyond_the_limit() {
    let (all, now) = (ReversePullStore::default(), Instant::now());
    let later = |at: usize| now + RETENTION + Duration::from_millis(at as u64);
    for session in 0..=MAX_SESSIONS {
        all.insert(SessionId(session as u128), entry(9, later(session)), now);
    }
    assert_eq!(all.0.lock().len(), MAX_SESSIONS);
    assert!(all.take(SessionId(0)).is_none());
    assert!(all.take(SessionId(1)).is_some());
    let after = later(MAX_SESSIONS / 2);
    all.insert(SessionId(u128::MAX), entry(9, later(2 * MAX_SESSIONS)), after);
    all.insert(SessionId(u128::MAX - 1), entry(9, later(2 * MAX_SESSIONS)), after);
    assert!(all.0.lock().len() <= MAX_SESSIONS / 2 + 2, "the expired ones go all at once");
}

#[test]
fn parameters_are_redacted_in_debug_output() {
    let printed = format!("{:?}", entry(9, Instant::now()));
    assert!(!printed.contains("10.0.0.7") && !printed.contains("cmpl-1"), "{printed}");
}

#[test]
fn a_content_id_covers_all_tokens_in_order_and_the_namespace() {
    let named = content_id(PrefixId(1), &[1, 2, 3]);
    assert!(named.is_some());
    for (root, ids) in [(1, vec![1, 2]), (1, vec![1, 3, 2]), (2, vec![1, 2, 3]), (1, vec![1, 2, 3, 4])] {
        assert_ne!(content_id(PrefixId(root), &ids), named);
    }
    assert_eq!(content_id(PrefixId(1), &[]), None);
}
