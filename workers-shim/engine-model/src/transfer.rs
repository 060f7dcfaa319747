//! KV transfer between engines. A producer holds a finished request's blocks under a lease, and a consumer pulls them.
//! Reads are one-sided, as with RDMA: a reader with outdated or wrong parameters gets whatever is stored there, and no
//! error.

use std::collections::HashSet;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use vocabulary::Micros;

use crate::engine::Engine;
use crate::pool::BlockId;
use crate::sequence::Sequence;
use crate::{EngineOutputKind, EngineRequestId, FinishReason, KvFingerprint, RemoteBlocks, TransferRole};

/// The contents of a block during a transfer.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct BlockImage {
    /// The fingerprint on top of which it was computed.
    pub start: KvFingerprint,
    /// Its tokens.
    pub tokens: Vec<u32>,
}

impl BlockImage {
    /// Returns a damaged copy: whoever reads it continues from a wrong fingerprint.
    #[must_use]
    pub fn corrupted(self) -> Self {
        Self { start: self.start.corrupted(), ..self }
    }
}

/// What a consumer must know about a producer's finished request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HandoffOffer {
    /// The request's name.
    pub request: Arc<str>,
    /// Its blocks.
    pub blocks: Vec<u32>,
    /// Tokens whose KV they hold.
    pub tokens: u32,
    /// Tokens of these that were found in the producer's cache.
    pub cached: u32,
    /// Why they are held.
    pub target: HoldPurpose,
}

/// Why a finished request's blocks are held.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HoldPurpose {
    /// The consumer that generates the answer.
    Consumer,
    /// The producer of the next turn, until this time.
    NextTurn(Micros),
}

/// Minimum number of tokens to pull; fewer are recomputed: vLLM's `kv_recompute_threshold`.
pub(crate) const RECOMPUTE_THRESHOLD: usize = 64;

/// Blocks held for a consumer.
pub(crate) struct HeldBlocks {
    pub(crate) blocks: Vec<BlockId>,
    pub(crate) expires: Micros,
}

/// State of a consumer's transfer.
pub(crate) enum PullState {
    /// Invalid parameters: it never completes.
    Hung,
    /// The driver was asked to fetch the blocks.
    Requested,
    /// On the link; with the times of its end and its start.
    InTransit { due: Micros, began: Micros, images: Vec<BlockImage> },
    /// The producer does not answer; fails at `due`.
    Failing { due: Micros },
}

impl PullState {
    pub(crate) fn due(&self) -> Option<Micros> {
        match self {
            PullState::Hung | PullState::Requested => None,
            PullState::InTransit { due, .. } | PullState::Failing { due } => Some(*due),
        }
    }
}

impl Engine {
    /// Reads blocks for a consumer. Blocks of a request that is no longer held count as reused, so they are garbage.
    pub fn export(&self, request: &str, blocks: &[u32]) -> Vec<BlockImage> {
        let hold = self.links.holds.get(request);
        let promised: HashSet<u32> = hold.into_iter().flat_map(|hold| &hold.blocks).map(|id| id.0).collect();
        let image = |number: &u32| {
            let content = self.pool.peek(*number)?;
            let start = if promised.contains(number) { content.start } else { content.start.corrupted() };
            Some(BlockImage { start, tokens: content.tokens.clone() })
        };
        blocks.iter().map_while(image).collect()
    }

    /// Frees the blocks of a request after its consumer has read them.
    pub fn release(&mut self, request: &str) {
        if let Some(hold) = self.links.holds.remove(request) {
            self.pool.release(&hold.blocks);
        }
    }

    /// Starts the transfer on the link, after the blocks of a `Pull` were read.
    pub fn pull_arrived(&mut self, now: Micros, id: EngineRequestId, images: Vec<BlockImage>) {
        let Some(pulling) = self.links.pulling.get_mut(&id).filter(|p| matches!(p, PullState::Requested)) else {
            return;
        };
        let free = self.links.busy_until.max(now) + self.profile.link_time(images.len() as u32);
        self.links.busy_until = free;
        *pulling = PullState::InTransit { due: free + self.profile.link_latency, began: now, images };
    }

    /// Records that the producer of a `Pull` is unreachable. The request fails after a timeout.
    pub fn pull_failed(&mut self, now: Micros, id: EngineRequestId) {
        if let Some(pulling) = self.links.pulling.get_mut(&id) {
            *pulling = PullState::Failing { due: now + self.profile.peer_timeout };
        }
    }

    /// Returns for whom the blocks of a finished sequence are held; None if they are not.
    pub(crate) fn handoff_target(
        &self,
        at: Micros,
        (transfer, reason): (&TransferRole, FinishReason),
    ) -> Option<HoldPurpose> {
        match (transfer, reason) {
            (TransferRole::Produce | TransferRole::ReversePull(..), FinishReason::Length) => {
                Some(HoldPurpose::Consumer)
            }
            (TransferRole::Exchange(_), FinishReason::Length | FinishReason::Stop) => {
                Some(HoldPurpose::NextTurn(at + self.profile.reverse_pull_lease_duration))
            }
            _ => None,
        }
    }

    /// Holds a sequence's blocks for `purpose`.
    pub(crate) fn hold_blocks(&mut self, at: Micros, sequence: &mut Sequence, purpose: HoldPurpose) -> HandoffOffer {
        let cached = sequence.counts.cached.unwrap_or(0);
        let (tokens, expires) = match purpose {
            HoldPurpose::Consumer => (sequence.counts.prompt, at + self.profile.kv_lease_duration),
            HoldPurpose::NextTurn(until) => (sequence.memory.computed, until),
        };
        let mut blocks = sequence.memory.take_blocks();
        let whole = tokens.div_ceil(self.profile.block_size as usize).min(blocks.len());
        self.pool.release(&blocks.split_off(whole));
        let numbers = blocks.iter().map(|id| id.0).collect();
        if let Some(old) = self.links.holds.insert(sequence.name.clone(), HeldBlocks { blocks, expires }) {
            self.pool.release(&old.blocks);
        }
        HandoffOffer {
            request: sequence.name.clone(),
            blocks: numbers,
            tokens: tokens as u32,
            cached: cached as u32,
            target: purpose,
        }
    }

    /// Returns how many tokens of a prompt are to be pulled; None if none are, or if they were pulled already.
    pub(crate) fn tokens_to_pull(&self, id: EngineRequestId) -> Option<usize> {
        let sequence = self.sequences.get(&id).filter(|sequence| sequence.counts.external == 0)?;
        match &sequence.transfer {
            TransferRole::Consume(_) | TransferRole::Exchange(_) => Some(sequence.pending_tokens()),
            TransferRole::ReversePull(_, tokens) => {
                let most = (tokens.0 as usize).min(sequence.counts.prompt - 1);
                let count = most.saturating_sub(sequence.memory.computed);
                (count >= RECOMPUTE_THRESHOLD).then_some(count)
            }
            TransferRole::None | TransferRole::Produce | TransferRole::Hang => None,
        }
    }

    /// Returns a consumer's source without the blocks that were found here; the missing ones are always the last ones
    /// of the producer's.
    pub(crate) fn missing_source_blocks(&self, id: EngineRequestId) -> Option<RemoteBlocks> {
        let sequence = self.sequences.get(&id)?;
        let source = sequence.transfer.source()?;
        let block = self.profile.block_size as usize;
        if let TransferRole::ReversePull(..) = sequence.transfer {
            let found = (sequence.memory.computed / block).min(source.blocks.len());
            return Some(RemoteBlocks { blocks: source.blocks[found..].to_vec(), ..source.clone() });
        }
        let lacking = sequence.memory.blocks.len() - sequence.memory.computed / block;
        let skip = source.blocks.len().saturating_sub(lacking);
        Some(RemoteBlocks { blocks: source.blocks[skip..].to_vec(), ..source.clone() })
    }

    /// Ends the transfers that complete or fail at `at`.
    pub(crate) fn finish_due_pulls(&mut self, at: Micros) {
        let due = |p: &PullState| p.due().is_some_and(|due| due <= at);
        let over: Vec<EngineRequestId> = self.links.pulling.iter().filter(|(_, p)| due(p)).map(|(id, _)| *id).collect();
        for id in over {
            match self.links.pulling.remove(&id) {
                Some(PullState::InTransit { due, began, images }) => self.finish_pull(due, began, (id, images)),
                _ => {
                    self.stats.transfers.failed += 1;
                    self.finish_request(at, id, FinishReason::Error);
                }
            }
        }
    }

    fn finish_pull(&mut self, at: Micros, began: Micros, (id, images): (EngineRequestId, Vec<BlockImage>)) {
        let Some(source) = self.missing_source_blocks(id) else { return };
        let count = self.tokens_to_pull(id).unwrap_or_default();
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        let transfers = &mut self.stats.transfers;
        transfers.done += 1;
        transfers.bytes += self.profile.kv_bytes(images.len() as u32);
        transfers.micros += (at - began).0;
        sequence.counts.external = count;
        self.kv_events.extend(sequence.receive(count, images, (&mut self.pool, &self.voice)));
        self.batch.waiting.push_front(id);
        self.emit(at, EngineOutputKind::Pulled { request: id, source });
    }

    /// Releases blocks whose lease expires at `at`.
    pub(crate) fn expire_holds(&mut self, at: Micros) {
        let over = |hold: &HeldBlocks| hold.expires <= at;
        let names: Vec<Arc<str>> =
            self.links.holds.iter().filter(|(_, hold)| over(hold)).map(|(name, _)| name.clone()).collect();
        for name in names {
            self.release(&name);
            self.stats.expired_holds += 1;
        }
    }
}
