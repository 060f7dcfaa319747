//! At an equal applied index every node has applied the same entries and has the same state, and every state is valid.

use std::collections::BTreeMap;

use consensus::AppliedEntry;
use ledger::{Ledger, LedgerEntry, Outcome, invariants};
use xxhash_rust::xxh3::Xxh3;

use crate::checks::log_order::TermLeader;
use crate::ensure;
use crate::property::{PropertyResult, PropertyViolation};

const STATES: &str = "at equal applied index, state hashes are equal";
const ENTRIES: &str = "at equal index, every node applies the same entry";

const OUTCOMES: &str = "at equal index, every node has the same outcomes";

/// Interval, in entries, at which the whole state is hashed; once states differ they stay different.
const HASH_EVERY: u64 = 8;

#[derive(Debug)]
struct LogSlot {
    leadership: TermLeader,
    entry: Option<LedgerEntry>,
    outcomes: Vec<Outcome>,
    state: Option<u128>,
}

#[derive(Debug, Default)]
pub(crate) struct AgreementCheck {
    slots: BTreeMap<u64, LogSlot>,
    newest: Ledger,
}

impl AgreementCheck {
    /// Called when a node applied an entry. Returns whether it is the first to do so.
    pub(crate) fn on_applied(&mut self, node: u64, applied: &AppliedEntry<'_>) -> Result<bool, PropertyViolation> {
        let index = applied.id.index;
        let leadership = (applied.id.leader_id.term, applied.id.leader_id.node_id);
        let state = index.is_multiple_of(HASH_EVERY).then(|| applied.ledger.state_hash());
        if let Some(slot) = self.slots.get(&index) {
            let same = slot.leadership == leadership && slot.entry.as_ref() == applied.entry;
            let first = slot.leadership;
            ensure!(
                same,
                ENTRIES,
                "node {node} applied another entry {index}, of {leadership:?} instead of {first:?}"
            )?;
            ensure!(slot.outcomes == applied.outcomes, OUTCOMES, "node {node} at {index}")?;
            ensure!(slot.state == state, STATES, "node {node} at {index}")?;
            return Ok(false);
        }
        let last = self.last();
        ensure!(
            index == last + 1 || last == 0,
            ENTRIES,
            "node {node} applied {index} when nobody had applied {}",
            last + 1
        )?;
        let sound =
            invariants::check(applied.ledger).and_then(|()| invariants::check_step(&self.newest, applied.ledger));
        sound.map_err(|violation| PropertyViolation {
            check: violation.invariant,
            detail: format!("after entry {index} at node {node}: {}", violation.detail),
        })?;
        self.newest = applied.ledger.clone();
        self.slots.insert(
            index,
            LogSlot { leadership, entry: applied.entry.cloned(), outcomes: applied.outcomes.to_vec(), state },
        );
        Ok(true)
    }

    /// Called when a snapshot replaced a node's state.
    pub(crate) fn on_installed(&self, node: u64, ledger: &Ledger) -> PropertyResult {
        let index = ledger.applied();
        let known = self.slots.get(&index).and_then(|slot| slot.state);
        ensure!(
            known.is_none_or(|state| state == ledger.state_hash()),
            STATES,
            "node {node} after a snapshot at {index}"
        )
    }

    /// Returns the last index that any node applied.
    pub(crate) fn last(&self) -> u64 {
        self.slots.last_key_value().map_or(0, |(index, _)| *index)
    }

    pub(crate) fn digest(&self) -> u128 {
        let mut digest = Xxh3::new();
        for (index, slot) in &self.slots {
            digest.update(&index.to_le_bytes());
            digest.update(&slot.leadership.0.to_le_bytes());
            digest.update(&slot.leadership.1.to_le_bytes());
            digest.update(&slot.state.unwrap_or(0).to_le_bytes());
        }
        digest.digest128()
    }
}
