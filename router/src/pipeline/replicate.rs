//! Replication: makes a sealed prefix resident at another worker by a prefill leg at its holder and a decode leg at its
//! target, both with the same token ids. Afterwards the target serves the real request from its own cache.

use std::sync::Arc;
use std::time::Instant;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use planner::{Handoff as Moving, Leg, Plan};
use vocabulary::{Blocks, Bytes, Micros, Owner, PrefixId, Tokens, WorkerId};
use workers_shim::engine_api::{
    EngineResponse, HandoffParams, KvTransfer, LegOrder, REPLICATE_PATH, ReplicationRequest, source_leg, target_leg,
};

use super::identify::IdentifiedRequest;
use super::legs::{LegError, Legs};
use super::plan::ClassifiedStep;
use super::prompts::{PromptStore, StoredPrompt, TokenIdsUnavailable};
use super::receipt::AttemptEvent;
use super::token_ids::PromptTokenIds;
use crate::app_state::AppState;

/// The prefix and the target of one replication.
pub type ReplicationKey = (PrefixId, WorkerId);

/// Future that reads the token ids of a prefix.
type TokenIdsFuture = BoxFuture<'static, Result<Vec<u32>, TokenIdsUnavailable>>;

/// A prefix transfer in progress.
struct PrefixMove {
    legs: Legs,
    model: String,
    ids: TokenIdsFuture,
    salt: Option<String>,
    bytes: Bytes,
    source: Leg,
    target: Leg,
}

/// Replicates the first `blocks` of the prompt to the plan's target. A failure is returned as an event; the step is
/// served all the same.
pub async fn replicate(
    gateway: &AppState,
    (step, plan): (&ClassifiedStep, &Plan),
    legs: &Legs,
    (source, blocks): (Leg, Blocks),
) -> Option<AttemptEvent> {
    let prompt = &step.located.identified.prompt;
    let Some(prefix) = prompt.chain.prefix(blocks) else { return Some(AttemptEvent::ReplicateFailed) };
    let moving = PrefixMove {
        legs: legs.clone(),
        model: step.ask.model.0.to_string(),
        ids: first_token_ids(gateway.caches.prompts.clone(), &step.located.identified, blocks),
        salt: step.located.identified.request.cache_salt().map(str::to_owned),
        bytes: plan.handoff.as_ref().map(Moving::bytes).unwrap_or_default(),
        source,
        target: Leg { tokens_computed: Tokens::ZERO, ..plan.decode },
    };
    let flight = gateway.replications.run((prefix, plan.target()), moving.run());
    flight.await.unwrap_or(Some(AttemptEvent::ReplicateFailed))
}

/// Replicates the first `blocks` of a stored prompt from `source` to `target`. A failure is returned as an event.
pub async fn relocate(
    gateway: &Arc<AppState>,
    kept: &Arc<StoredPrompt>,
    (blocks, bytes): (Blocks, Bytes),
    (source, target): (Owner, Owner),
) -> Option<AttemptEvent> {
    let Some(prefix) = kept.chain.prefix(blocks) else { return Some(AttemptEvent::ReplicateFailed) };
    let (prompts, again) = (gateway.caches.prompts.clone(), kept.clone());
    let leg = |owner: Owner| Leg {
        worker: owner.worker,
        rank: owner.rank,
        tokens_cached: Tokens::ZERO,
        tokens_computed: Tokens::ZERO,
    };
    let moving = PrefixMove {
        legs: Legs::without_client(gateway),
        model: kept.model.to_string(),
        ids: async move { prompts.read(move || again.first_token_ids(blocks)).await }.boxed(),
        salt: kept.salt.clone(),
        bytes,
        source: leg(source),
        target: leg(target),
    };
    let flight = gateway.replications.run((prefix, target.worker), moving.run());
    flight.await.unwrap_or(Some(AttemptEvent::ReplicateFailed))
}

/// Returns the token ids of the first blocks of a step's prompt.
fn first_token_ids(prompts: Arc<PromptStore>, prefixed: &IdentifiedRequest, blocks: Blocks) -> TokenIdsFuture {
    let chain = prefixed.prompt.chain.clone();
    let ids = PromptTokenIds::of(prefixed);
    async move {
        let length = usize::try_from(blocks.tokens(chain.block).0).map_err(|_| TokenIdsUnavailable::Unavailable)?;
        match ids.ok_or(TokenIdsUnavailable::Unavailable)? {
            PromptTokenIds::Known(ids) => {
                ids.get(..length).map(<[u32]>::to_vec).ok_or(TokenIdsUnavailable::Unavailable)
            }
            ids => prompts.read(move || Some(ids.read(&chain)?.get(..length)?.to_vec())).await,
        }
    }
    .boxed()
}

impl PrefixMove {
    async fn run(mut self) -> Option<AttemptEvent> {
        let tokens = match (&mut self.ids).await {
            Ok(tokens) => tokens,
            Err(TokenIdsUnavailable::QueueFull) => return Some(AttemptEvent::NoRoomToEncode),
            Err(TokenIdsUnavailable::Unavailable) => return Some(AttemptEvent::ReplicateFailed),
        };
        // Their connectors matched when this was planned, so one of them has left.
        let Some(transfer) = self.legs.transfer(&self.source, &self.target) else {
            return Some(AttemptEvent::ReplicateFailed);
        };
        let replica = ReplicationRequest { model: &self.model, tokens: &tokens, salt: self.salt.as_deref() };
        let pair = TransferLegs { legs: &self.legs, source: &self.source, target: &self.target };
        let moved = match transfer.leg_order() {
            Some(LegOrder::Concurrent) => pair.run_concurrently(&replica, &transfer).await,
            Some(LegOrder::SourceFirst | LegOrder::Stored) | None => pair.run_sequentially(&replica, &transfer).await,
        };
        match moved {
            Ok((took, remark)) => {
                self.legs.record_transfer(self.target.worker, self.bytes, took);
                remark
            }
            Err(ReplicationFailure::SourceLost) => Some(AttemptEvent::ReplicateFailed),
            Err(ReplicationFailure::NothingToSend) => Some(AttemptEvent::NoTransferParameters),
            Err(ReplicationFailure::Failed(error)) => {
                let (source, target) = (self.source.worker, self.target.worker);
                tracing::warn!(%source, %target, %error, "a replicate failed");
                Some(AttemptEvent::ReplicateFailed)
            }
        }
    }
}

/// The two legs of a transfer.
struct TransferLegs<'a> {
    legs: &'a Legs,
    source: &'a Leg,
    target: &'a Leg,
}

impl TransferLegs<'_> {
    /// Runs the source's leg, then the target's. Returns the duration of the second, and deviations from the
    /// expectation.
    async fn run_sequentially(
        &self,
        replica: &ReplicationRequest<'_>,
        transfer: &KvTransfer,
    ) -> Result<(Micros, Option<AttemptEvent>), ReplicationFailure> {
        let answer = self.run_source(replica, transfer).await?;
        if answer.handoff.is_none() && transfer.leg_order() == Some(LegOrder::SourceFirst) {
            return Err(ReplicationFailure::NothingToSend);
        }
        let cached = answer.handoff.as_ref().and_then(HandoffParams::source_cached);
        let recomputed = cached.is_some_and(|cached| cached.0 * 10 < replica.tokens.len() as u64 * 9);
        let since = Instant::now();
        self.run_target(replica, (transfer, answer.handoff)).await?;
        Ok((Micros::of(since.elapsed()), recomputed.then_some(AttemptEvent::SourceRecomputed)))
    }

    /// Runs both legs at once.
    async fn run_concurrently(
        &self,
        replica: &ReplicationRequest<'_>,
        transfer: &KvTransfer,
    ) -> Result<(Micros, Option<AttemptEvent>), ReplicationFailure> {
        let since = Instant::now();
        tokio::try_join!(self.run_source(replica, transfer), self.run_target(replica, (transfer, None)))?;
        Ok((Micros::of(since.elapsed()), None))
    }

    async fn run_source(
        &self,
        replica: &ReplicationRequest<'_>,
        transfer: &KvTransfer,
    ) -> Result<EngineResponse, ReplicationFailure> {
        let _counted = self.legs.dispatch(self.source);
        tokio::select! {
            answer = self.legs.send_silent(self.source, REPLICATE_PATH, source_leg(replica, transfer)) => answer.map_err(ReplicationFailure::Failed),
            () = self.legs.worker_lost(self.source.worker) => Err(ReplicationFailure::Failed(LegError::Broken)),
        }
    }

    async fn run_target(
        &self,
        replica: &ReplicationRequest<'_>,
        with: (&KvTransfer, Option<HandoffParams>),
    ) -> Result<(), ReplicationFailure> {
        tokio::select! {
            pulled = self.legs.send_silent(self.target, REPLICATE_PATH, target_leg(replica, with)) => pulled.map(drop).map_err(ReplicationFailure::Failed),
            () = self.legs.worker_lost(self.source.worker) => Err(ReplicationFailure::SourceLost),
        }
    }
}

/// Why a prefix did not move.
enum ReplicationFailure {
    Failed(LegError),
    /// The source returned no transfer parameters.
    NothingToSend,
    /// The source became unreachable.
    SourceLost,
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;
    use vocabulary::{DpRank, HashSeed, Incarnation, PrefixChain, TenantId};

    use super::*;
    use crate::testing::{StubWorker, start_router, wait_until};

    #[tokio::test]
    async fn replication_fails_without_a_request_when_the_encoding_queue_is_full() {
        let worker = StubWorker::start("one", "tiny").await;
        let front = start_router(&[&worker], &[]).await;
        let ids: Vec<u32> = (0..64).collect();
        let chain = PrefixChain::over_tokens(PrefixId(9), HashSeed(3), Tokens(16), &ids);
        let tokens = PromptTokenIds::Known(ids);
        let kept =
            Arc::new(StoredPrompt { tenant: TenantId::default(), model: "tiny".into(), chain, tokens, salt: None });
        let owner = |id| Owner { worker: WorkerId(id), incarnation: Incarnation(1), rank: DpRank(0) };
        let moved = || relocate(&front.gateway, &kept, (Blocks(2), Bytes(1)), (owner(1), owner(2)));

        let (go, gate) = std::sync::mpsc::channel::<()>();
        let gate = Arc::new(Mutex::new(gate));
        let waiting: Vec<_> = std::iter::from_fn(|| {
            let (prompts, gate) = (front.gateway.caches.prompts.clone(), gate.clone());
            Some(tokio::spawn(async move { prompts.read(move || gate.lock().recv().ok()).await }))
        })
        .take(64)
        .collect();
        wait_until("they wait", || !front.gateway.caches.prompts.has_room()).await;
        assert_eq!(moved().await, Some(AttemptEvent::NoRoomToEncode));
        assert_eq!(
            (AttemptEvent::NoRoomToEncode.as_ref(), AttemptEvent::NoRoomToEncode.prevented_transfer()),
            ("no_room_to_encode", true)
        );
        drop(go);
        for one in waiting {
            assert_eq!(one.await.unwrap(), Err(TokenIdsUnavailable::Unavailable));
        }
        assert_eq!(moved().await, Some(AttemptEvent::ReplicateFailed), "now for want of workers");
        assert_eq!(worker.requests().len(), 0);
    }
}
