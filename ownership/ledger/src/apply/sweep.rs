//! Incremental garbage collection: every entry forgets a bounded number of expired records.

use vocabulary::{LedgerTime, Micros};

use crate::ledger::Ledger;

impl Ledger {
    /// Forgets expired intents and copies, and sessions and unreferenced artifacts that were idle too long.
    pub(super) fn sweep(&mut self) {
        let mut budget = self.records.limits.sweep;
        while budget > 0 && self.sweep_one() {
            budget -= 1;
        }
    }

    /// Forgets one record; returns false if there is none to forget.
    fn sweep_one(&mut self) -> bool {
        let now = self.now();
        let limits = self.records.limits;
        if let Some((_, session)) = self.index.intents.get_min().filter(|(end, _)| *end <= now).copied() {
            let intents = self.intents(session).copied().collect();
            self.put_intents(session, intents);
        } else if let Some((_, id, holder)) = self.index.replicas.get_min().filter(|(end, ..)| *end <= now).copied() {
            if let Some(mut artifact) = self.artifact(id) {
                artifact.replicas.retain(|copy| copy.holder != holder);
                self.put_artifact(artifact);
            }
        } else if self
            .index
            .sessions
            .first()
            .is_some_and(|([touched, ..], ())| is_idle(LedgerTime(*touched), limits.session_idle, now))
        {
            self.close_coldest_session();
        } else if self
            .index
            .idle_artifacts
            .get_min()
            .is_some_and(|(touched, _)| is_idle(*touched, limits.artifact_idle, now))
        {
            self.evict_coldest_artifact();
        } else {
            return false;
        }
        true
    }
}

fn is_idle(touched_at: LedgerTime, after: Micros, now: LedgerTime) -> bool {
    touched_at.after(after) <= now
}
