//! A sealed prefix is made present at another worker: a prefill leg at its holder, a decode leg at its target, both with
//! the same token ids. Afterwards the target serves the real request from its own cache.

use std::sync::Arc;
use std::time::Instant;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use planner::{Handoff as Moving, Leg, Plan};
use vocabulary::{Blocks, Bytes, Micros, Owner, PrefixId, Tokens, WorkerId};
use workers_shim::dialect::{
    Answer, Handoff, Order, REPLICATE_PATH, Replica, Transfer, replicate_decode, replicate_prefill,
};

use super::identify::Prefixed;
use super::legs::{LegError, Legs};
use super::plan::Classified;
use super::prompts::{Kept, Prompts, Unread};
use super::receipt::Remark;
use super::token_ids::TokenIds;
use crate::gateway::Gateway;

/// What one run makes present, and where.
pub type Flight = (PrefixId, WorkerId);

/// The token ids of a prefix, read when somebody waits for them.
type Ids = BoxFuture<'static, Result<Vec<u32>, Unread>>;

/// A prefix on its way.
struct Move {
    legs: Legs,
    model: String,
    ids: Ids,
    salt: Option<String>,
    bytes: Bytes,
    source: Leg,
    target: Leg,
}

/// Makes the first `blocks` of the prompt present at the plan's target. What went wrong is remarked; the step is served
/// all the same.
pub async fn replicate(
    gateway: &Gateway,
    (step, plan): (&Classified, &Plan),
    legs: &Legs,
    (source, blocks): (Leg, Blocks),
) -> Option<Remark> {
    let prompt = &step.located.prefixed.prompt;
    let Some(prefix) = prompt.chain.prefix(blocks) else { return Some(Remark::ReplicateFailed) };
    let moving = Move {
        legs: legs.clone(),
        model: step.ask.model.0.to_string(),
        ids: first(gateway.remembered.prompts.clone(), &step.located.prefixed, blocks),
        salt: step.located.prefixed.request.cache_salt().map(str::to_owned),
        bytes: plan.handoff.as_ref().map(Moving::bytes).unwrap_or_default(),
        source,
        target: Leg { tokens_computed: Tokens::ZERO, ..plan.decode },
    };
    let flight = gateway.replicates.run((prefix, plan.target()), moving.run());
    flight.await.unwrap_or(Some(Remark::ReplicateFailed))
}

/// Makes the first `blocks` of a kept prompt present at `target`, from `source`. What went wrong is remarked.
pub async fn relocate(
    gateway: &Arc<Gateway>,
    kept: &Arc<Kept>,
    (blocks, bytes): (Blocks, Bytes),
    (source, target): (Owner, Owner),
) -> Option<Remark> {
    let Some(prefix) = kept.chain.prefix(blocks) else { return Some(Remark::ReplicateFailed) };
    let (prompts, again) = (gateway.remembered.prompts.clone(), kept.clone());
    let leg = |owner: Owner| Leg {
        worker: owner.worker,
        rank: owner.rank,
        tokens_cached: Tokens::ZERO,
        tokens_computed: Tokens::ZERO,
    };
    let moving = Move {
        legs: Legs::unasked(gateway),
        model: kept.model.to_string(),
        ids: async move { prompts.read(move || again.first(blocks)).await }.boxed(),
        salt: kept.salt.clone(),
        bytes,
        source: leg(source),
        target: leg(target),
    };
    let flight = gateway.replicates.run((prefix, target.worker), moving.run());
    flight.await.unwrap_or(Some(Remark::ReplicateFailed))
}

/// The token ids of the first blocks of a step's prompt.
fn first(prompts: Arc<Prompts>, prefixed: &Prefixed, blocks: Blocks) -> Ids {
    let chain = prefixed.prompt.chain.clone();
    let ids = TokenIds::of(prefixed);
    async move {
        let length = usize::try_from(blocks.tokens(chain.block).0).map_err(|_| Unread::Unknown)?;
        match ids.ok_or(Unread::Unknown)? {
            TokenIds::Here(ids) => ids.get(..length).map(<[u32]>::to_vec).ok_or(Unread::Unknown),
            ids => prompts.read(move || Some(ids.read(&chain)?.get(..length)?.to_vec())).await,
        }
    }
    .boxed()
}

impl Move {
    async fn run(mut self) -> Option<Remark> {
        let tokens = match (&mut self.ids).await {
            Ok(tokens) => tokens,
            Err(Unread::NoRoom) => return Some(Remark::NoRoomToEncode),
            Err(Unread::Unknown) => return Some(Remark::ReplicateFailed),
        };
        // They spoke one dialect when this was planned: one of them is gone.
        let Some(transfer) = self.legs.transfer(&self.source, &self.target) else {
            return Some(Remark::ReplicateFailed);
        };
        let replica = Replica { model: &self.model, tokens: &tokens, salt: self.salt.as_deref() };
        let pair = Pair { legs: &self.legs, source: &self.source, target: &self.target };
        let moved = match transfer.order() {
            Some(Order::Together) => pair.together(&replica, &transfer).await,
            Some(Order::Handed | Order::Stored) | None => pair.in_turn(&replica, &transfer).await,
        };
        match moved {
            Ok((took, remark)) => {
                self.legs.transferred(self.target.worker, self.bytes, took);
                remark
            }
            Err(Gone::Source) => Some(Remark::ReplicateFailed),
            Err(Gone::NothingToSend) => Some(Remark::NoTransferParameters),
            Err(Gone::Failed(error)) => {
                let (source, target) = (self.source.worker, self.target.worker);
                tracing::warn!(%source, %target, %error, "a replicate failed");
                Some(Remark::ReplicateFailed)
            }
        }
    }
}

/// The two legs of a move.
struct Pair<'a> {
    legs: &'a Legs,
    source: &'a Leg,
    target: &'a Leg,
}

impl Pair<'_> {
    /// The source's leg, then the target's. How long the second took, and what went otherwise than believed.
    async fn in_turn(&self, replica: &Replica<'_>, transfer: &Transfer) -> Result<(Micros, Option<Remark>), Gone> {
        let answer = self.at_source(replica, transfer).await?;
        if answer.handoff.is_none() && transfer.order() == Some(Order::Handed) {
            return Err(Gone::NothingToSend);
        }
        let cached = answer.handoff.as_ref().and_then(Handoff::source_cached);
        let recomputed = cached.is_some_and(|cached| cached.0 * 10 < replica.tokens.len() as u64 * 9);
        let since = Instant::now();
        self.at_target(replica, (transfer, answer.handoff)).await?;
        Ok((Micros::of(since.elapsed()), recomputed.then_some(Remark::SourceRecomputed)))
    }

    /// Both legs at once.
    async fn together(&self, replica: &Replica<'_>, transfer: &Transfer) -> Result<(Micros, Option<Remark>), Gone> {
        let since = Instant::now();
        tokio::try_join!(self.at_source(replica, transfer), self.at_target(replica, (transfer, None)))?;
        Ok((Micros::of(since.elapsed()), None))
    }

    async fn at_source(&self, replica: &Replica<'_>, transfer: &Transfer) -> Result<Answer, Gone> {
        let _counted = self.legs.dispatch(self.source);
        tokio::select! {
            answer = self.legs.silent(self.source, REPLICATE_PATH, replicate_prefill(replica, transfer)) => answer.map_err(Gone::Failed),
            () = self.legs.lost(self.source.worker) => Err(Gone::Failed(LegError::Broken)),
        }
    }

    async fn at_target(&self, replica: &Replica<'_>, with: (&Transfer, Option<Handoff>)) -> Result<(), Gone> {
        tokio::select! {
            pulled = self.legs.silent(self.target, REPLICATE_PATH, replicate_decode(replica, with)) => pulled.map(drop).map_err(Gone::Failed),
            () = self.legs.lost(self.source.worker) => Err(Gone::Source),
        }
    }
}

/// Why a prefix did not move.
enum Gone {
    Failed(LegError),
    /// The source offered nothing.
    NothingToSend,
    /// The source cannot be reached any more.
    Source,
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;
    use vocabulary::{Chain, DpRank, Incarnation, Seed, TenantId};

    use super::*;
    use crate::testing::{Worker, front, until};

    #[tokio::test]
    async fn a_move_for_which_too_many_encodings_wait_says_so_and_asks_no_worker() {
        let worker = Worker::start("one", "tiny").await;
        let front = front(&[&worker], &[]).await;
        let ids: Vec<u32> = (0..64).collect();
        let chain = Chain::over_tokens(PrefixId(9), Seed(3), Tokens(16), &ids);
        let tokens = TokenIds::Here(ids);
        let kept = Arc::new(Kept { tenant: TenantId::default(), model: "tiny".into(), chain, tokens, salt: None });
        let owner = |id| Owner { worker: WorkerId(id), incarnation: Incarnation(1), rank: DpRank(0) };
        let moved = || relocate(&front.gateway, &kept, (Blocks(2), Bytes(1)), (owner(1), owner(2)));

        let (go, gate) = std::sync::mpsc::channel::<()>();
        let gate = Arc::new(Mutex::new(gate));
        let waiting: Vec<_> = std::iter::from_fn(|| {
            let (prompts, gate) = (front.gateway.remembered.prompts.clone(), gate.clone());
            Some(tokio::spawn(async move { prompts.read(move || gate.lock().recv().ok()).await }))
        })
        .take(64)
        .collect();
        until("they wait", || !front.gateway.remembered.prompts.has_room()).await;
        assert_eq!(moved().await, Some(Remark::NoRoomToEncode));
        assert_eq!(
            (Remark::NoRoomToEncode.as_ref(), Remark::NoRoomToEncode.nothing_moved()),
            ("no_room_to_encode", true)
        );
        drop(go);
        for one in waiting {
            assert_eq!(one.await.unwrap(), Err(Unread::Unknown));
        }
        assert_eq!(moved().await, Some(Remark::ReplicateFailed), "now for want of workers");
        assert_eq!(worker.seen().len(), 0);
    }
}
