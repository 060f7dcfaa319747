//! Follows the events of one rank in one incarnation of a worker: its connection, its messages, how exactly its blocks
//! are known, and the snapshots of them that routers give each other.

use std::time::{Duration, SystemTime};

use bytes::Bytes;
use residency::{
    BlockMappingRules, DecodeError, DecodeLimits, KnowledgeGap, KvCacheEvent, KvEventBatch, LiveSocketHealth,
    MessageAction, ProcessMatch, ResidencyFeed, SequenceTracker, decode, turnover_blocks,
};
use tokio::sync::{OwnedSemaphorePermit, mpsc, watch};
use tokio::time::{interval_at, sleep};
use vocabulary::{DpRank, Incarnation, KvIndexState, Micros, Tier, Tokens};

use super::connection::{ConnectionLoss, subscribe, wait_unresponsive};
use super::{FollowedWorker, misfit_reason, wait_incarnation_end};
use crate::events::discovery::EventSource;
use crate::events::replay::{EventMessage, replay};
use crate::events::snapshot_provider::{EncodedSnapshot, SnapshotRequest, SnapshotSender};
use crate::events::sources::InexactReason;
use crate::fleet::probe::current_incarnation;
use crate::zmtp::ZmtpConnection;

/// Interval between attempts to connect to a publisher.
const RETRY_INTERVAL: Duration = Duration::from_millis(200);
/// Delay before the first check for lost messages: a new subscription misses messages that were published before it
/// took effect.
const FIRST_CHECK_DELAY: Duration = Duration::from_millis(300);
/// Interval of later checks: without a following message, a lost one leaves no visible gap.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// Maximum number of replays in a row; the next check continues there.
const MAX_REPLAYS: usize = 64;

/// Why a rank or its connection is no longer followed.
#[derive(Debug)]
pub(super) enum FollowEnd {
    /// Another process answers now.
    Restarted,
    /// The connection was lost.
    Lost(ConnectionLoss),
    /// Its blocks of this many tokens cannot be mapped to chain blocks.
    Misfit(Tokens),
}

struct ReportedState {
    blocks: u64,
    kv_index_state: KvIndexState,
    /// Whether the lost connection was logged.
    is_disconnected: bool,
    /// Whether lost events were logged.
    has_loss: bool,
}

pub(super) struct RankFollower {
    pub(super) worker: FollowedWorker,
    pub(super) source: EventSource,
    pub(super) stream: SequenceTracker,
    pub(super) feed: ResidencyFeed,
    rules: BlockMappingRules,
    /// Whether its connection is one of [`FollowerEnvironment::extra_ranks`](super::FollowerEnvironment).
    is_extra: bool,
    /// Whether it was logged that no connection was left for it.
    has_waited: bool,
    last_report: ReportedState,
    /// Whether blocks were stored outside of device memory: how many of those fit is unknown.
    pub(super) is_tiered: bool,
    /// Snapshot requests of other routers.
    snapshot_requests: mpsc::Receiver<SnapshotSender>,
}

impl RankFollower {
    pub(super) fn new(worker: FollowedWorker, source: EventSource, rules: BlockMappingRules, is_extra: bool) -> Self {
        let feed = ResidencyFeed::new(worker.member.id, source.rank, rules.clone());
        let mut stream = SequenceTracker::new();
        stream.expect_process(worker.incarnation);
        let snapshot_requests = worker.member.exports.register(source.rank);
        let last_report = ReportedState {
            blocks: 0,
            kv_index_state: KvIndexState::Degraded,
            is_disconnected: false,
            has_loss: false,
        };
        Self {
            worker,
            source,
            stream,
            feed,
            rules,
            is_extra,
            has_waited: false,
            last_report,
            is_tiered: false,
            snapshot_requests,
        }
    }

    /// Follows the rank until the incarnation ends, or its block size or another rank's does not fit.
    pub(super) async fn run(mut self, misfit: &mut watch::Receiver<Option<Tokens>>) -> FollowEnd {
        let (member, incarnation) = (self.worker.member.clone(), self.worker.incarnation);
        self.apply_to_index();
        let end = loop {
            let end = tokio::select! {
                () = wait_incarnation_end(&member, incarnation) => FollowEnd::Restarted,
                Some(block) = wait_misfit(misfit) => FollowEnd::Misfit(block),
                end = self.run_connection() => end,
            };
            self.mark_disconnected(&end);
            if !matches!(end, FollowEnd::Lost(_)) {
                break end;
            }
            sleep(RETRY_INTERVAL).await;
        };
        if let FollowEnd::Restarted = end {
            // The prober will find the new incarnation; until then the worker must not be followed.
            wait_incarnation_end(&member, incarnation).await;
        }
        self.feed.leave();
        self.apply_to_index();
        end
    }

    /// Opens one connection to the publisher and reads it to its end.
    async fn run_connection(&mut self) -> FollowEnd {
        let endpoint = self.source.live.clone();
        let _permit = if self.is_extra { Some(self.acquire_extra_rank().await) } else { None };
        let connection = match subscribe(&endpoint).await {
            Ok(connection) => connection,
            Err(loss) => return FollowEnd::Lost(loss),
        };
        tokio::select! {
            end = self.read_live(connection) => end,
            () = wait_unresponsive(&endpoint) => FollowEnd::Lost(ConnectionLoss::Unresponsive),
        }
    }

    /// Waits until one more rank may be connected.
    async fn acquire_extra_rank(&mut self) -> OwnedSemaphorePermit {
        let ranks = self.worker.environment.extra_ranks.clone();
        let permit = match ranks.clone().try_acquire_owned() {
            Ok(permit) => Ok(permit),
            Err(_) if self.has_waited => ranks.acquire_owned().await,
            Err(_) => {
                self.has_waited = true;
                let (worker, rank) = (&self.worker.member.spec.endpoint, self.source.rank.0);
                tracing::warn!(
                    worker = %worker,
                    rank,
                    "the events of this rank are not read: all connections for ranks beyond each worker's first are in use. \
                     There are 1,024 where the limit of open files is at least 49,152"
                );
                ranks.acquire_owned().await
            }
        };
        permit.expect("the semaphore is never closed")
    }

    /// Reads a connection to its end. Cancel-safe: messages are applied without a wait in between.
    async fn read_live(&mut self, mut connection: ZmtpConnection) -> FollowEnd {
        self.mark_connected();
        if let Err(end) = self.synchronize().await {
            return end;
        }
        let mut check = interval_at(tokio::time::Instant::now() + FIRST_CHECK_DELAY, CHECK_INTERVAL);
        loop {
            let step = tokio::select! {
                message = connection.recv() => match message {
                    Ok(message) => self.handle_live(EventMessage::from_frames(message)).await,
                    Err(error) => Err(FollowEnd::Lost(error.into())),
                },
                _ = check.tick() => self.check_for_loss().await,
                Some(request) = self.snapshot_requests.recv() => {
                    self.export_snapshot(request).await;
                    Ok(())
                }
            };
            if let Err(end) = step {
                return end;
            }
        }
    }

    /// Records that the connection stands.
    fn mark_connected(&mut self) {
        if std::mem::take(&mut self.last_report.is_disconnected) {
            let (worker, source) = (&self.worker.member.spec.endpoint, &self.source.live);
            tracing::info!(%worker, %source, rank = self.source.rank.0, "the connection to the worker's KV events is restored");
        }
        self.publish_reason();
    }

    /// Records that the connection was lost or refused: what is known may become outdated.
    fn mark_disconnected(&mut self, end: &FollowEnd) {
        match end {
            FollowEnd::Lost(loss) => {
                if !std::mem::replace(&mut self.last_report.is_disconnected, true) {
                    let (worker, source) = (&self.worker.member.spec.endpoint, &self.source.live);
                    tracing::warn!(%worker, %source, rank = self.source.rank.0, reason = %loss,
                        "the connection to the worker's KV events is lost; its KV index is DEGRADED until it is restored. Check that the engine publishes and this host reaches the source");
                }
                self.stream.disconnect();
            }
            FollowEnd::Restarted | FollowEnd::Misfit(_) => self.start_over(),
        }
        let doubt = match end {
            FollowEnd::Lost(_) => InexactReason::Unconnected { live: self.source.live.clone() },
            FollowEnd::Restarted => InexactReason::Replaced,
            FollowEnd::Misfit(block) => misfit_reason(&self.rules, *block),
        };
        self.worker.member.events.sources.set_reason(self.source.rank, Some(doubt));
        self.publish_knowledge();
    }

    /// Forgets all blocks. The index is marked inexact first, or it would count as exact while the blocks are removed.
    fn start_over(&mut self) {
        self.stream.on_process_restart();
        self.publish_knowledge();
        self.feed.reset();
        self.apply_to_index();
    }

    /// Fetches what is missing: a snapshot of another router if not everything is known here, then a replay from the
    /// engine.
    async fn synchronize(&mut self) -> Result<(), FollowEnd> {
        self.adopt_snapshot().await;
        self.catch_up().await
    }

    /// Synchronizes, and checks whether the live connection delivered what the replay did.
    async fn check_for_loss(&mut self) -> Result<(), FollowEnd> {
        let from = self.stream.next();
        self.synchronize().await?;
        match self.stream.check_live_socket(from) {
            LiveSocketHealth::Fine => Ok(()),
            LiveSocketHealth::Deaf => Err(FollowEnd::Lost(ConnectionLoss::Deaf)),
        }
    }

    async fn handle_live(&mut self, message: Option<EventMessage>) -> Result<(), FollowEnd> {
        let log = &self.worker.member.events;
        let Some(message) = message else {
            log.counts.lock().undecodable += 1;
            self.stream.record_loss();
            self.publish_state();
            return Ok(());
        };
        match self.stream.on_live(message.sequence) {
            MessageAction::Duplicate => Ok(()),
            MessageAction::Apply => self.apply(&message),
            MessageAction::Restarted => {
                log.counts.lock().engine_restarts += 1;
                self.start_over();
                Err(FollowEnd::Lost(ConnectionLoss::SequenceReset))
            }
            MessageAction::Replay { .. } => {
                log.counts.lock().gaps += 1;
                self.catch_up().await?;
                match self.stream.after_replay(message.sequence) {
                    MessageAction::Apply => self.apply(&message),
                    _ => Ok(()),
                }
            }
        }
    }

    /// Asks the worker for its process identity.
    async fn identify_process(&mut self) -> Result<ProcessMatch, FollowEnd> {
        let process = current_incarnation(&self.worker.environment.client, &self.worker.member).await;
        let met = self.stream.identify_process(process);
        if met == ProcessMatch::Another {
            self.worker.member.events.counts.lock().engine_restarts += 1;
            return Err(FollowEnd::Restarted);
        }
        Ok(met)
    }

    /// Replays what is missing, with a check of the process identity before and after: the replay could come from
    /// another process.
    async fn catch_up(&mut self) -> Result<(), FollowEnd> {
        let before = self.identify_process().await?;
        if let Some(endpoint) = self.source.replay.clone() {
            let from = self.stream.next();
            let is_whole = self.replay(&endpoint).await?;
            let is_same = before == ProcessMatch::Same && self.identify_process().await? == ProcessMatch::Same;
            if is_same && is_whole {
                self.stream.replay_ended();
            } else if !is_same && self.stream.next() > from {
                self.stream.replay_unidentified();
            }
        }
        self.publish_state();
        Ok(())
    }

    /// Applies replays. Returns whether one was complete, without a gap.
    ///
    /// A publisher drops messages beyond a reader's high-water mark (1,000 by default for a ZMQ ROUTER), the end marker
    /// included. Messages missing inside a replay are requested again; only those missing before its first message are
    /// lost.
    async fn replay(&mut self, endpoint: &str) -> Result<bool, FollowEnd> {
        for _ in 0..MAX_REPLAYS {
            let from = self.stream.next();
            if self.replay_once(endpoint).await? {
                return Ok(true);
            }
            if self.stream.next() == from {
                break;
            }
        }
        Ok(false)
    }

    async fn replay_once(&mut self, endpoint: &str) -> Result<bool, FollowEnd> {
        self.worker.member.events.counts.lock().replays += 1;
        let (mut outcome, mut is_first, mut is_torn) = (Ok(()), true, false);
        let replayed = replay(endpoint, self.stream.next(), |message| {
            is_torn |= !is_first && message.sequence > self.stream.next();
            is_first = false;
            if !is_torn && outcome.is_ok() && self.stream.on_replayed(message.sequence) == MessageAction::Apply {
                outcome = self.apply(&message);
            }
        });
        let replayed = replayed.await;
        if let Err(error) = &replayed {
            tracing::debug!(worker = %self.worker.member.spec.endpoint, %error, "replay");
        }
        outcome.map(|()| replayed.is_ok() && !is_torn)
    }

    /// Updates the index, and publishes how exactly the blocks are known.
    pub(super) fn publish_state(&mut self) {
        self.publish_reason();
        self.publish_knowledge();
        let is_holed = matches!(self.stream.gap(), Some(KnowledgeGap::Lost(_)));
        let (worker, rank) = (&self.worker.member.spec.endpoint, self.source.rank.0);
        match (std::mem::replace(&mut self.last_report.has_loss, is_holed), self.inexact_reason()) {
            (false, Some(doubt)) if is_holed => {
                tracing::warn!(%worker, rank, reason = %doubt, "not all of its blocks are known")
            }
            (true, None) => {
                tracing::info!(%worker, rank, "lost KV events no longer matter; the worker's blocks are known exactly again")
            }
            _ => {}
        }
    }

    fn publish_knowledge(&mut self) {
        let kv_index_state = self.stream.kv_index_state();
        let before = std::mem::replace(&mut self.last_report.kv_index_state, kv_index_state);
        if before != kv_index_state {
            self.feed.set_kv_index_state(kv_index_state);
        }
        self.apply_to_index();
        if before != kv_index_state {
            self.worker.member.invalidate_views();
        }
    }

    /// Publishes why the blocks are not known exactly, while connected.
    fn publish_reason(&self) {
        self.worker.member.events.sources.set_reason(self.source.rank, self.inexact_reason());
    }

    /// Returns how many blocks the engine can hold; None if unknown.
    pub(super) fn max_blocks(&self) -> Option<u64> {
        self.worker.member.max_blocks().filter(|_| !self.is_tiered)
    }

    fn inexact_reason(&self) -> Option<InexactReason> {
        self.stream.gap().map(|gap| match (gap, &self.source.replay) {
            (KnowledgeGap::Unidentified, _) => InexactReason::Unidentified,
            (KnowledgeGap::CatchingUp, Some(replay)) => InexactReason::Replaying { replay: replay.clone() },
            (KnowledgeGap::CatchingUp, None) => InexactReason::NoReplay,
            (KnowledgeGap::Lost(stored), replay) => InexactReason::Lost {
                stored,
                needed: self.max_blocks().map(turnover_blocks),
                replays: replay.is_some(),
            },
        })
    }

    fn apply_to_index(&mut self) {
        let worker = &self.worker;
        let now = self.feed.blocks() as u64;
        let before = std::mem::replace(&mut self.last_report.blocks, now);
        // The worker's count is the sum over its ranks.
        let mut counts = worker.member.events.counts.lock();
        counts.blocks = counts.blocks + now - before;
        drop(counts);
        if let Err(error) = worker.environment.index.apply_feed(&mut self.feed) {
            tracing::error!(worker = %worker.member.spec.endpoint, %error, "residency");
        }
    }
}

/// Waits until a rank has found a block size that does not fit, and returns it.
async fn wait_misfit(misfit: &mut watch::Receiver<Option<Tokens>>) -> Option<Tokens> {
    misfit.wait_for(Option::is_some).await.ok().and_then(|block| *block)
}

impl RankFollower {
    /// Applies a message that is next in sequence.
    pub(super) fn apply(&mut self, message: &EventMessage) -> Result<(), FollowEnd> {
        match decode(&message.payload, &DecodeLimits::default()) {
            Err(error) => self.record_undecodable(error),
            // One socket can carry several ranks; each follower reads only its own.
            Ok(batch) if batch.rank.is_some_and(|rank| rank != self.source.rank && rank != DpRank(0)) => {}
            Ok(batch) => self.ingest(&batch)?,
        }
        self.publish_state();
        Ok(())
    }

    fn ingest(&mut self, batch: &KvEventBatch) -> Result<(), FollowEnd> {
        let before = self.feed.counts();
        if batch.events.contains(&KvCacheEvent::Cleared) {
            self.stream.cache_cleared();
        }
        self.feed.ingest_all(&batch.events);
        let after = self.feed.counts();
        let orphans = after.orphans - before.orphans;
        let mut counts = self.worker.member.events.counts.lock();
        counts.unknown_blocks += orphans + after.unknown_removals - before.unknown_removals;
        counts.events += batch.events.len() as u64;
        counts.batches += 1;
        counts.lag = Micros(clock_lag(batch.timestamp));
        drop(counts);
        if orphans > 0 {
            self.stream.record_orphan();
        } else {
            self.record_turnover(batch);
        }
        // Last, because a loss in this message must not be cleared by the message itself.
        if after.over_limit > before.over_limit {
            self.stream.record_loss();
        }
        if after.indivisible > before.indivisible {
            return Err(FollowEnd::Misfit(misfit_block(batch, self.feed.rules().block)));
        }
        Ok(())
    }

    /// Counts stored blocks: after a full turnover of the cache, lost events no longer matter.
    fn record_turnover(&mut self, batch: &KvEventBatch) {
        let stored = || batch.events.iter().filter_map(KvCacheEvent::stored_copies);
        self.is_tiered |= stored().any(|(tier, _)| tier != Tier::Hbm);
        // If more blocks are known than fit, removals were lost, too, and some of the known blocks do not exist any
        // more.
        let most = self.max_blocks().filter(|most| self.feed.blocks() as u64 <= *most);
        self.stream.record_stored(stored().map(|(_, blocks)| blocks).sum(), most);
    }

    fn record_undecodable(&mut self, error: DecodeError) {
        tracing::warn!(worker = %self.worker.member.spec.endpoint, %error, "an event message cannot be read");
        self.worker.member.events.counts.lock().undecodable += 1;
        self.stream.record_loss();
    }
}

/// Returns the size in tokens of the first block that is not a multiple of the chain block.
fn misfit_block(batch: &KvEventBatch, chain: Tokens) -> Tokens {
    let sizes = batch.events.iter().filter_map(|event| match event {
        KvCacheEvent::Stored(stored) => Some(u64::from(stored.block_size)),
        _ => None,
    });
    let mut odd = sizes.filter(|size| *size == 0 || !size.is_multiple_of(chain.0));
    Tokens(odd.next().unwrap_or_default())
}

/// Returns the microseconds from an engine's timestamp to now; 0 where its clock is ahead.
fn clock_lag(timestamp: f64) -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    ((now.as_secs_f64() - timestamp) * 1e6).max(0.0) as u64
}

impl RankFollower {
    /// Writes a snapshot, if the blocks are known exactly. Events wait in the socket meanwhile.
    pub(super) async fn export_snapshot(&self, reply: SnapshotSender) {
        let exact = self.stream.kv_index_state() == KvIndexState::Exact && self.worker.incarnation != Incarnation(0);
        let mut chunks = Vec::new();
        let mut writer = self.feed.snapshot(self.worker.incarnation, self.stream.next());
        let head = writer.head();
        while exact && !reply.is_closed() {
            let Some(chunk) = writer.next() else { break };
            chunks.push(Bytes::from(chunk));
            // Lets other tasks run between chunks.
            tokio::task::yield_now().await;
        }
        // The requester may be gone.
        let _ = reply.send(exact.then_some(EncodedSnapshot { head, chunks }));
    }

    /// Adopts a snapshot of another router, unless the blocks are known exactly here.
    pub(super) async fn adopt_snapshot(&mut self) {
        let process = self.worker.incarnation;
        if self.stream.kv_index_state() == KvIndexState::Exact || process == Incarnation(0) {
            return;
        }
        let Some(snapshots) = &self.worker.environment.snapshots else { return };
        let (worker, rank) = (self.worker.member.id, self.source.rank);
        let request = SnapshotRequest { worker, rank, process, rules: self.feed.rules().clone() };
        let Some(snapshot) = snapshots.fetch(request).await else { return };
        // Messages received since the snapshot have to be applied again, from a replay.
        if snapshot.head.next < self.stream.next() && self.source.replay.is_none() {
            return;
        }
        let (endpoint, next) = (&self.worker.member.spec.endpoint, snapshot.head.next);
        tracing::debug!(worker = %endpoint, next, "a snapshot of another router is taken over");
        self.worker.member.events.counts.lock().peer_snapshots += 1;
        self.stream.adopt(process, next);
        self.feed.adopt(snapshot);
    }
}
