//! Rendezvous hashing: every router orders the workers of a session alike, and the order differs between sessions.

use vocabulary::{SessionId, WorkerId};
use xxhash_rust::xxh3::xxh3_64;

/// Returns the weight of a worker for a session; the highest wins. xxh3-64 over both ids, little endian.
pub(crate) fn weight(session: SessionId, worker: WorkerId) -> u64 {
    let mut key = [0u8; 24];
    key[..16].copy_from_slice(&session.0.to_le_bytes());
    key[16..].copy_from_slice(&worker.0.to_le_bytes());
    xxh3_64(&key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rendezvous_spreads_sessions_and_moves_only_those_of_a_lost_worker() {
        let best = |session: u128, workers: u64| {
            (0..workers).map(WorkerId).max_by_key(|w| weight(SessionId(session), *w)).unwrap().0
        };
        let mut counts = [0u32; 8];
        for session in 0..8_000 {
            let before = best(session, 8);
            counts[before as usize] += 1;
            if before != 7 {
                assert_eq!(best(session, 7), before, "session {session} must not move when worker 7 leaves");
            }
        }
        assert!(counts.iter().all(|n| (850..1_150).contains(n)), "{counts:?}");
    }
}
