//! Prefix mover: makes a sealed prefix resident at another worker by a prefill leg at its holder and a decode leg at
//! its target, both with the same token ids. Concurrent moves of one prefix to one target share one transfer.

use std::sync::Arc;
use std::time::Instant;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use planner::{Action, DirectedLink, Leg, LegRole, WorkerRank};
use vocabulary::{Blocks, Bytes, Micros, Owner, PrefixId, WorkerId};
use workers_shim::engine_api::{
    AnswerSummary, HandoffParams, KvTransfer, LegOrder, REPLICATE_PATH, ReplicationRequest, source_leg, target_leg,
};

use crate::leg_outcome::LegError;
use crate::legs::Legs;
use crate::prompts::{RetainedPrompt, RetainedPromptStore, TokenIdsUnavailable};
use crate::receipt::AttemptEvent;
use crate::single_flight::SingleFlight;
use crate::transfer_checker::{CompletedTransfer, TransferChecker};
use crate::worker_client::WorkerClient;

/// The prefix and the target of one replication.
pub type ReplicationKey = (PrefixId, WorkerId);

/// Future that reads the token ids of a prefix.
pub(crate) type TokenIdsFuture = BoxFuture<'static, Result<Vec<u32>, TokenIdsUnavailable>>;

/// A prefix transfer in progress.
pub(crate) struct PrefixMove {
    pub(crate) legs: Legs,
    pub(crate) model: String,
    pub(crate) ids: TokenIdsFuture,
    pub(crate) salt: Option<String>,
    pub(crate) bytes: Bytes,
    pub(crate) source: Leg,
    pub(crate) target: Leg,
}

/// Move of a retained prompt that no step waits for.
#[derive(Clone, Copy, Debug)]
pub struct PrefixRelocation {
    /// Number of leading blocks to move.
    pub blocks: Blocks,
    /// Their size.
    pub bytes: Bytes,
    /// Where they are.
    pub source: Owner,
    /// Where they are to be.
    pub target: Owner,
    /// What the move belongs to.
    pub action: Action,
}

/// Moves prefixes between workers. Clones share the moves in progress.
#[derive(Clone, Debug)]
pub struct PrefixMover {
    client: WorkerClient,
    prompts: Arc<RetainedPromptStore>,
    moves: Arc<SingleFlight<ReplicationKey, Option<AttemptEvent>>>,
    checker: TransferChecker,
}

impl PrefixMover {
    /// Returns a mover of these prompts' prefixes.
    pub fn new(client: WorkerClient, prompts: Arc<RetainedPromptStore>, checker: TransferChecker) -> Self {
        Self { client, prompts, moves: Arc::default(), checker }
    }

    /// Returns the store that reads token ids.
    pub(crate) fn prompts(&self) -> &Arc<RetainedPromptStore> {
        &self.prompts
    }

    /// Moves the first blocks of a retained prompt, and checks the transfer if a check is due. A failure is returned as
    /// an event.
    pub async fn relocate(&self, prompt: &Arc<RetainedPrompt>, relocation: PrefixRelocation) -> Option<AttemptEvent> {
        let PrefixRelocation { blocks, bytes, source, target, action } = relocation;
        let Some(prefix) = prompt.chain.prefix(blocks) else { return Some(AttemptEvent::ReplicateFailed) };
        let (prompts, again) = (self.prompts.clone(), prompt.clone());
        let leg = |role, Owner { worker, rank, .. }: Owner| Leg::new(role, WorkerRank { worker, rank });
        let moving = PrefixMove {
            legs: Legs::without_client(&self.client),
            model: prompt.model.to_string(),
            ids: async move { prompts.read(move || again.first_token_ids(blocks)).await }.boxed(),
            salt: prompt.salt.clone(),
            bytes,
            source: leg(LegRole::Prefill, source),
            target: leg(LegRole::Decode, target),
        };
        let event = self.run(prefix, moving).await;
        if matches!(event, None | Some(AttemptEvent::SourceRecomputed)) {
            let link = DirectedLink { from: source.worker, to: target.worker };
            let transfer = CompletedTransfer { link, rank: target.rank, blocks: Some(blocks), action };
            self.checker.check_if_due(transfer, prompt);
        }
        event
    }

    /// Runs a move, or waits for the one of the same prefix to the same target.
    pub(crate) async fn run(&self, prefix: PrefixId, moving: PrefixMove) -> Option<AttemptEvent> {
        let flight = self.moves.run((prefix, moving.target.worker), moving.run());
        flight.await.unwrap_or(Some(AttemptEvent::ReplicateFailed))
    }
}

impl PrefixMove {
    async fn run(mut self) -> Option<AttemptEvent> {
        let tokens = match (&mut self.ids).await {
            Ok(tokens) => tokens,
            Err(TokenIdsUnavailable::QueueFull) => return Some(AttemptEvent::EncodeQueueFull),
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
            Ok((took, event)) => {
                self.legs.record_transfer(self.target.worker, self.bytes, took);
                event
            }
            Err(ReplicationFailure::SourceLost) => Some(AttemptEvent::ReplicateFailed),
            Err(ReplicationFailure::NothingToSend) => Some(AttemptEvent::MissingKvTransferParams),
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
    ) -> Result<AnswerSummary, ReplicationFailure> {
        let _counted = self.legs.dispatch(self.source);
        tokio::select! {
            answer = self.legs.send_silent(self.source, REPLICATE_PATH, source_leg(replica, transfer).into()) => answer.map_err(ReplicationFailure::Failed),
            () = self.legs.worker_lost(self.source.worker) => Err(ReplicationFailure::Failed(LegError::Broken)),
        }
    }

    async fn run_target(
        &self,
        replica: &ReplicationRequest<'_>,
        with: (&KvTransfer, Option<HandoffParams>),
    ) -> Result<(), ReplicationFailure> {
        tokio::select! {
            pulled = self.legs.send_silent(self.target, REPLICATE_PATH, target_leg(replica, with).into()) => pulled.map(drop).map_err(ReplicationFailure::Failed),
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
    use strum::VariantArray as _;
    use vocabulary::{DpRank, HashSeed, Incarnation, PrefixChain, TenantId, Tokens, WorkerHealth};

    use super::*;
    use crate::lab::sim_command::tests::{sim, url};
    use crate::testing::{StubWorker, start_router, start_router_at, wait_until};
    use crate::token_ids::LazyTokenIds;
    use crate::transfer_check::TransferCheckOutcome;

    #[tokio::test]
    async fn replication_fails_without_a_request_when_the_encoding_queue_is_full() {
        let worker = StubWorker::start("one", "tiny").await;
        let router = start_router(&[&worker], &[]).await;
        let ids: Vec<u32> = (0..64).collect();
        let chain = PrefixChain::over_tokens(PrefixId(9), HashSeed(3), Tokens(16), &ids);
        let tokens = LazyTokenIds::Known(ids);
        let kept =
            Arc::new(RetainedPrompt { tenant: TenantId::default(), model: "tiny".into(), chain, tokens, salt: None });
        let owner = |id| Owner { worker: WorkerId(id), incarnation: Incarnation(1), rank: DpRank(0) };
        let wanted = PrefixRelocation {
            blocks: Blocks(2),
            bytes: Bytes(1),
            source: owner(1),
            target: owner(2),
            action: Action::ArtifactFetch,
        };
        let moved = || router.gateway.prefix_mover.relocate(&kept, wanted);

        let (go, gate) = std::sync::mpsc::channel::<()>();
        let gate = Arc::new(Mutex::new(gate));
        let waiting: Vec<_> = std::iter::from_fn(|| {
            let (prompts, gate) = (router.gateway.caches.prompts.clone(), gate.clone());
            Some(tokio::spawn(async move { prompts.read(move || gate.lock().recv().ok()).await }))
        })
        .take(64)
        .collect();
        wait_until("they wait", || !router.gateway.caches.prompts.has_room()).await;
        assert_eq!(moved().await, Some(AttemptEvent::EncodeQueueFull));
        assert_eq!(
            (AttemptEvent::EncodeQueueFull.as_ref(), AttemptEvent::EncodeQueueFull.prevented_transfer()),
            ("encode_queue_full", true)
        );
        drop(go);
        for one in waiting {
            assert_eq!(one.await.unwrap(), Err(TokenIdsUnavailable::Unavailable));
        }
        assert_eq!(moved().await, Some(AttemptEvent::ReplicateFailed), "now for want of workers");
        assert_eq!(worker.requests().len(), 0);
    }

    #[tokio::test]
    async fn a_relocation_is_checked_once() {
        let (one, two) = (sim(&["--speed-up=50"]).await, sim(&["--speed-up=50"]).await);
        let router = start_router_at(&[url(&one), url(&two)], &["transfer_check.sample_every=1"]).await;
        let app_state = &router.gateway;
        let is_linked = || {
            let fleet = app_state.fleet().snapshot();
            fleet.iter().filter(|view| view.link.is_some() && view.health == WorkerHealth::Ready).count() == 2
        };
        wait_until("both are ready", is_linked).await;
        let fleet = app_state.fleet().snapshot();
        let owner = |url: String| {
            let view = fleet.iter().find(|view| view.id == WorkerId::of_endpoint(&url)).unwrap();
            Owner { worker: view.id, incarnation: view.incarnation, rank: DpRank(0) }
        };
        let ids: Vec<u32> = (0..64).map(|id| id % 50 + 3).collect();
        let chain = PrefixChain::over_tokens(PrefixId(9), HashSeed(3), Tokens(16), &ids);
        let tokens = LazyTokenIds::Known(ids);
        let kept =
            Arc::new(RetainedPrompt { tenant: TenantId::default(), model: "tiny".into(), chain, tokens, salt: None });
        let wanted = PrefixRelocation {
            blocks: Blocks(4),
            bytes: Bytes(1),
            source: owner(url(&one)),
            target: owner(url(&two)),
            action: Action::StateMigration,
        };
        let event = app_state.prefix_mover.relocate(&kept, wanted).await;
        assert!(matches!(event, None | Some(AttemptEvent::SourceRecomputed)), "{event:?}");
        let outcomes = &app_state.metrics.decisions.checks;
        let checks = || -> u64 {
            TransferCheckOutcome::VARIANTS.iter().map(|it| outcomes.with_label_values(&[it.as_ref()]).get()).sum()
        };
        wait_until("it is checked", || checks() > 0).await;
        assert_eq!(checks(), 1);
        let missing = PrefixRelocation { source: Owner { worker: WorkerId(1), ..wanted.source }, ..wanted };
        assert_eq!(app_state.prefix_mover.relocate(&kept, missing).await, Some(AttemptEvent::ReplicateFailed));
        assert_eq!(checks(), 1, "nothing moved");
    }
}
