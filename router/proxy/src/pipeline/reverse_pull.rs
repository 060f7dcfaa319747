//! Reverse pull: the parameters that a decode worker hands back with its answer are kept for the session's next step,
//! whose prefill leg then fetches what was computed there. They are used once, never shown to clients, and sent only
//! for a prompt that begins with the same tokens.
//!
//! Losing them costs recomputation. `router/decisions/0010` explains why they may be kept at all.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use axum::response::Response;
use bytes::Bytes;
use http::header::CONTENT_LENGTH;
use parking_lot::Mutex;
use planner::{AttentionSpec, DirectedLink, LayerState, Leg, LegRole, WorkerRank, check_kv_compatibility};
use prometheus::IntCounterVec;
use vocabulary::{HashSeed, Owner, PrefixChain, PrefixId, SessionId, Tokens, WorkerHealth, WorkerId};
use workers_shim::engine_api::{ReturnsKv, ReversePullParams, answer_token_ids, redact_answer};

use super::execute::ExecuteStage;
use super::remote_prefill::LegPair;
use super::step_workers::is_converted_by_guess;
use crate::identified_request::{IdentifiedRequest, shown_ids};
use crate::leg_outcome::LegResponse;
use crate::legs::Legs;
use crate::receipt::ReversePullOutcome;
use crate::request_states::{ClassifiedStep, owner_at};
use crate::token_ids::LazyTokenIds;

/// How long parameters are kept: a minute less than an engine keeps the blocks (`decoder_kv_blocks_ttl`).
const RETENTION: Duration = Duration::from_secs(420);
/// Maximum number of sessions whose parameters are kept.
const MAX_SESSIONS: usize = 4096;

/// Stored parameters for the next step of a session.
#[derive(Debug)]
pub struct StoredReversePull {
    params: ReversePullParams,
    holder: Owner,
    /// Hash of the tokens that the prompt must begin with.
    content_id: PrefixId,
    expires_at: Instant,
}

impl StoredReversePull {
    /// Whether the holder still keeps the blocks.
    fn is_retained(&self, now: Instant) -> bool {
        now < self.expires_at
    }
}

/// The stored parameters, at most one entry per session.
#[derive(Debug, Default)]
pub struct ReversePullStore(Mutex<HashMap<SessionId, StoredReversePull>>);

impl ReversePullStore {
    /// Removes and returns the entry of a session.
    pub fn take(&self, session: SessionId) -> Option<StoredReversePull> {
        self.0.lock().remove(&session)
    }

    fn insert(&self, session: SessionId, entry: StoredReversePull, now: Instant) {
        let mut entries = self.0.lock();
        if entries.len() >= MAX_SESSIONS {
            entries.retain(|_, entry| entry.is_retained(now));
        }
        if entries.len() >= MAX_SESSIONS {
            let oldest = entries.iter().min_by_key(|(_, entry)| entry.expires_at).map(|(session, _)| *session);
            oldest.and_then(|session| entries.remove(&session));
        }
        entries.insert(session, entry);
    }
}

/// What a prefill leg can fetch.
#[derive(Debug)]
pub struct ReversePullSource {
    pub(super) params: ReversePullParams,
    pub(super) holder: WorkerId,
    /// Counter of the outcomes.
    pub(super) outcomes: IntCounterVec,
}

/// Returns what was kept for a step, if its prefill leg can use it.
pub async fn check_usable(
    stage: &ExecuteStage,
    (step, pair): (&ClassifiedStep, &LegPair),
    entry: Option<StoredReversePull>,
) -> Option<ReversePullSource> {
    let entry = entry?;
    let outcomes = stage.pull_outcomes.clone();
    let outcome = match entry.is_retained(Instant::now()) && can_fetch_from(stage, (step, pair), entry.holder) {
        false => ReversePullOutcome::Unusable,
        true if !starts_with_returned(stage, &step.located.identified, &entry).await => {
            ReversePullOutcome::PromptMismatch
        }
        true => return Some(ReversePullSource { params: entry.params, holder: entry.holder.worker, outcomes }),
    };
    outcomes.with_label_values(&[outcome.as_ref()]).inc();
    None
}

/// Counts an entry that its step cannot use.
pub fn count_unused(stage: &ExecuteStage, entry: Option<StoredReversePull>) {
    if entry.is_some() {
        let outcomes = &stage.pull_outcomes;
        outcomes.with_label_values(&[ReversePullOutcome::Unusable.as_ref()]).inc();
    }
}

/// Whether the prefill leg can fetch from this worker incarnation.
fn can_fetch_from(stage: &ExecuteStage, (step, pair): (&ClassifiedStep, &LegPair), holder: Owner) -> bool {
    let (from, to) = (holder.worker, pair.prefill.worker);
    let workers = stage.client.fleet().snapshot();
    let view = |id: WorkerId| workers.iter().find(|view| view.id == id);
    let (Some(source), Some(target)) = (view(from), view(to)) else { return false };
    let fabric = |view: &vocabulary::WorkerView| view.link.as_ref().map(|link| link.fabric.clone());
    let leg = Leg::new(LegRole::Decode, WorkerRank { worker: from, rank: holder.rank });
    let transfer = Legs::without_client(&stage.client).transfer(&leg, &pair.prefill);
    let attention = step.located.identified.model.attention.as_deref();
    let shapes = stage.client.pool().shapes();
    let shape = |id: WorkerId| shapes.iter().find(|(known, _)| *known == id).map(|(_, shape)| *shape);
    let is_compatible =
        shape(from).zip(shape(to)).is_none_or(|(from, to)| check_kv_compatibility(attention, from, to).is_ok());
    from != to
        && is_compatible
        && attention.is_some_and(has_full_attention)
        && source.incarnation == holder.incarnation
        && source.health != WorkerHealth::Unreachable
        && fabric(source).is_some_and(|source_fabric| Some(source_fabric) == fabric(target))
        && transfer.is_some_and(|transfer| transfer.returns_kv() == ReturnsKv::WithWholeAnswers)
        && !step.disabled_links.contains(&DirectedLink { from, to })
        && !is_converted_by_guess(stage.client.fleet(), &step.located.identified, to)
}

/// Whether all layers keep all tokens; with other layers the correctness of fetched KV is not verified.
fn has_full_attention(attention: &AttentionSpec) -> bool {
    attention.layers().iter().all(|layer| matches!(layer, LayerState::Dense(_) | LayerState::Mla(_)))
}

/// Whether a prompt begins with the tokens whose KV was handed back: for any other prompt that KV would be wrong.
async fn starts_with_returned(stage: &ExecuteStage, identified: &IdentifiedRequest, entry: &StoredReversePull) -> bool {
    let (chain, returned_id) = (identified.prompt.chain.clone(), entry.content_id);
    let Ok(length) = usize::try_from(entry.params.tokens().0) else { return false };
    let is_known = identified.fallback_reason().is_none() && !identified.model.is_disabled_by_spot_check();
    let is_single_prompt = identified.other_chains.is_empty() && identified.request.has_single_prefill();
    if !is_known || !is_single_prompt || chain.tokens < entry.params.tokens() {
        return false;
    }
    let Some(ids) = LazyTokenIds::of(identified) else { return false };
    let prompt_id = move || Some(content_id(chain.root, ids.read(&chain)?.get(..length)?));
    stage.prompts.read(prompt_id).await.is_ok_and(|prompt_id| prompt_id == Some(returned_id))
}

/// Returns a hash of these tokens in this namespace.
fn content_id(root: PrefixId, ids: &[u32]) -> Option<PrefixId> {
    let block = Tokens(ids.len() as u64);
    (!ids.is_empty()).then(|| PrefixChain::over_tokens(root, HashSeed(0), block, ids))?.ids.first().copied()
}

/// Stores what the target of a remote prefill has handed back. Returns the answer without it, for the client.
pub fn store_returned(
    stage: &ExecuteStage,
    (step, pair): (&ClassifiedStep, &LegPair),
    opened: LegResponse,
) -> LegResponse {
    let LegResponse::Whole(answer, mut report) = opened else { return opened };
    if let Some(params) = report.reverse_pull.take().filter(|_| answer.status().is_success()) {
        store(stage, (step, pair), (params, answer.body()));
    }
    LegResponse::Whole(strip_for_client(step, answer), report)
}

fn store(stage: &ExecuteStage, (step, pair): (&ClassifiedStep, &LegPair), (params, body): (ReversePullParams, &Bytes)) {
    let transfer = Legs::without_client(&stage.client).transfer(&pair.prefill, &pair.decode);
    let is_declared = transfer.is_some_and(|transfer| transfer.returns_kv() == ReturnsKv::WithWholeAnswers);
    let Some(holder) = owner_at(&step.located, pair.decode.at()).filter(|_| is_declared) else { return };
    let Some(ids) = answer_token_ids(body) else { return };
    let root = step.located.identified.prompt.chain.root;
    let length = usize::try_from(params.tokens().0).unwrap_or(usize::MAX);
    let Some(content_id) = ids.get(..length).and_then(|ids| content_id(root, ids)) else { return };
    let now = Instant::now();
    let entry = StoredReversePull { params, holder, content_id, expires_at: now + RETENTION };
    stage.reverse_pulls.insert(step.located.session.id, entry, now);
}

fn strip_for_client(step: &ClassifiedStep, answer: Response<Bytes>) -> Response<Bytes> {
    let (mut head, body) = answer.into_parts();
    let redacted = redact_answer(&body, shown_ids(&step.located.identified.request));
    if redacted.len() != body.len() {
        head.headers.remove(CONTENT_LENGTH);
    }
    Response::from_parts(head, redacted)
}

#[cfg(test)]
mod tests;
