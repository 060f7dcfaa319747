//! What a decode worker hands back with its answer, kept for the session's next step: its prefill leg then fetches what was
//! computed there. Parameters are used once, shown to nobody, and sent only for a prompt that begins with the same tokens.
//!
//! A loss costs computing again. Why they may be kept at all is in `router/decisions/0010`.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::response::Response;
use bytes::Bytes;
use http::header::CONTENT_LENGTH;
use parking_lot::Mutex;
use planner::{AttentionSpec, BarredLink, LayerState, Leg, Plan, exchange};
use prometheus::IntCounterVec;
use strum::{AsRefStr, VariantArray};
use vocabulary::{Chain, Health, Owner, PrefixId, Seed, SessionId, Tokens, WorkerId};
use workers_shim::dialect::{HandsBack, Readback, for_client, said_ids};

use super::commit::server_of;
use super::identify::Prefixed;
use super::knowledge::is_converted_by_guess;
use super::legs::{Legs, Opened};
use super::plan::Classified;
use super::resumable::shown;
use super::token_ids::TokenIds;
use crate::gateway::Gateway;

/// How long they are kept: a minute less than an engine keeps the blocks (`decoder_kv_blocks_ttl`).
const KEPT_FOR: Duration = Duration::from_secs(420);
/// Most sessions whose parameters are kept.
const MOST: usize = 4096;

/// What came of parameters that were handed back.
#[derive(Clone, Copy, PartialEq, Eq, Debug, AsRefStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum Fate {
    /// The next step's prefill leg was answered with them.
    Fetched,
    /// It was not.
    Failed,
    /// The next step's prompt begins otherwise, or is not known by its tokens.
    OtherPrompt,
    /// Nobody could fetch with them: the step was served without a prefill leg, they came too late, or a worker is gone.
    Unfit,
}

/// Parameters for the next step of a session.
#[derive(Debug)]
pub struct Returned {
    readback: Readback,
    keeper: Owner,
    /// Names the tokens that its prompt must begin with.
    begins: PrefixId,
    until: Instant,
}

impl Returned {
    /// Whether its blocks are still kept for it.
    fn is_fresh(&self, now: Instant) -> bool {
        now < self.until
    }
}

/// What is kept, one a session.
#[derive(Debug, Default)]
pub struct Readbacks(Mutex<HashMap<SessionId, Returned>>);

impl Readbacks {
    /// Takes what is kept for a session, which is gone then.
    pub fn take(&self, session: SessionId) -> Option<Returned> {
        self.0.lock().remove(&session)
    }

    fn keep(&self, session: SessionId, returned: Returned, now: Instant) {
        let mut all = self.0.lock();
        if all.len() >= MOST {
            all.retain(|_, kept| now < kept.until);
        }
        if all.len() >= MOST {
            let oldest = all.iter().min_by_key(|(_, kept)| kept.until).map(|(session, _)| *session);
            oldest.and_then(|session| all.remove(&session));
        }
        all.insert(session, returned);
    }
}

/// What a prefill leg can fetch.
#[derive(Debug)]
pub struct Back {
    pub(super) readback: Readback,
    pub(super) keeper: WorkerId,
    /// Counts what comes of it.
    pub(super) fates: IntCounterVec,
}

/// What was kept for a step, if this plan's prefill leg can fetch with it.
pub async fn usable(
    gateway: &Arc<Gateway>,
    (step, plan): (&Classified, &Plan),
    kept: Option<Returned>,
) -> Option<Back> {
    let kept = kept?;
    let fates = gateway.metrics.plans.between_steps.readbacks.clone();
    let fate = match kept.is_fresh(Instant::now()) && fits(gateway, (step, plan), kept.keeper) {
        false => Fate::Unfit,
        true if !begins_so(gateway, &step.located.prefixed, &kept).await => Fate::OtherPrompt,
        true => return Some(Back { readback: kept.readback, keeper: kept.keeper.worker, fates }),
    };
    fates.with_label_values(&[fate.as_ref()]).inc();
    None
}

/// A step has no use for it.
pub fn unused(gateway: &Gateway, kept: Option<Returned>) {
    if kept.is_some() {
        gateway.metrics.plans.between_steps.readbacks.with_label_values(&[Fate::Unfit.as_ref()]).inc();
    }
}

/// Whether the plan's prefill leg can fetch from this life of a worker.
fn fits(gateway: &Arc<Gateway>, (step, plan): (&Classified, &Plan), keeper: Owner) -> bool {
    let (from, to) = (keeper.worker, plan.prefill.worker);
    let workers = gateway.fleet().snapshot();
    let view = |id: WorkerId| workers.iter().find(|view| view.id == id);
    let (Some(source), Some(target)) = (view(from), view(to)) else { return false };
    let fabric = |view: &vocabulary::WorkerView| view.link.as_ref().map(|link| link.fabric.clone());
    let leg = Leg { worker: from, rank: keeper.rank, tokens_cached: Tokens::ZERO, tokens_computed: Tokens::ZERO };
    let transfer = Legs::unasked(gateway).transfer(&leg, &plan.prefill);
    let attention = step.located.prefixed.model.attention.as_deref();
    let shapes = gateway.roster.shapes();
    let shape = |id: WorkerId| shapes.iter().find(|(known, _)| *known == id).map(|(_, shape)| *shape);
    let is_read = shape(from).zip(shape(to)).is_none_or(|(from, to)| exchange(attention, from, to).is_ok());
    from != to
        && is_read
        && attention.is_some_and(keeps_every_token)
        && source.incarnation == keeper.incarnation
        && source.health != Health::Unreachable
        && fabric(source).is_some_and(|fabric_of| Some(fabric_of) == fabric(target))
        && transfer.is_some_and(|transfer| transfer.hands_back() == HandsBack::WithWholeAnswers)
        && !step.barred.contains(&BarredLink { from, to })
        && !is_converted_by_guess(gateway, &step.located.prefixed, to)
}

/// Whether all layers keep all tokens; of others it was not seen that what is fetched is right.
fn keeps_every_token(attention: &AttentionSpec) -> bool {
    attention.layers().iter().all(|layer| matches!(layer, LayerState::Dense(_) | LayerState::Latent(_)))
}

/// Whether a prompt begins with the tokens whose KV was handed back: for any other one it would be wrong.
async fn begins_so(gateway: &Arc<Gateway>, prefixed: &Prefixed, kept: &Returned) -> bool {
    let (chain, begins) = (prefixed.prompt.chain.clone(), kept.begins);
    let Ok(length) = usize::try_from(kept.readback.tokens().0) else { return false };
    let is_known = prefixed.fallback().is_none() && !prefixed.model.is_distrusted();
    let is_one = prefixed.others.is_empty() && prefixed.request.is_computed_once();
    if !is_known || !is_one || chain.tokens < kept.readback.tokens() {
        return false;
    }
    let Some(ids) = TokenIds::of(prefixed) else { return false };
    let named = move || Some(name(chain.root, ids.read(&chain)?.get(..length)?));
    gateway.remembered.prompts.read(named).await.is_ok_and(|named| named == Some(begins))
}

/// A name for these tokens, in this namespace.
fn name(root: PrefixId, ids: &[u32]) -> Option<PrefixId> {
    let block = Tokens(ids.len() as u64);
    (!ids.is_empty()).then(|| Chain::over_tokens(root, Seed(0), block, ids))?.ids.first().copied()
}

/// Keeps what a remote prefill's target has handed back. The answer, as its client may see it.
pub fn kept(gateway: &Arc<Gateway>, (step, plan): (&Classified, &Plan), opened: Opened) -> Opened {
    let Opened::Whole(answer, mut told) = opened else { return opened };
    if let Some(readback) = told.readback.take().filter(|_| answer.status().is_success()) {
        keep(gateway, (step, plan), (readback, answer.body()));
    }
    Opened::Whole(client_sees(step, answer), told)
}

fn keep(gateway: &Arc<Gateway>, (step, plan): (&Classified, &Plan), (readback, body): (Readback, &Bytes)) {
    let transfer = Legs::unasked(gateway).transfer(&plan.prefill, &plan.decode);
    let is_declared = transfer.is_some_and(|transfer| transfer.hands_back() == HandsBack::WithWholeAnswers);
    let Some(keeper) = server_of(&step.located, plan).filter(|_| is_declared) else { return };
    let Some(ids) = said_ids(body) else { return };
    let root = step.located.prefixed.prompt.chain.root;
    let length = usize::try_from(readback.tokens().0).unwrap_or(usize::MAX);
    let Some(begins) = ids.get(..length).and_then(|ids| name(root, ids)) else { return };
    let now = Instant::now();
    let returned = Returned { readback, keeper, begins, until: now + KEPT_FOR };
    gateway.remembered.readbacks.keep(step.located.session.id, returned, now);
}

fn client_sees(step: &Classified, answer: Response<Bytes>) -> Response<Bytes> {
    let (mut head, body) = answer.into_parts();
    let seen = for_client(&body, shown(&step.located.prefixed.request));
    if seen.len() != body.len() {
        head.headers.remove(CONTENT_LENGTH);
    }
    Response::from_parts(head, seen)
}

#[cfg(test)]
mod tests;
