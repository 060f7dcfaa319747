//! Transfer checks: after a KV transfer, a step's or one that an operator ordered, the worker that received the KV and
//! a worker that computes the prompt itself are asked for the same few tokens, and the answers are compared.
//!
//! No client waits for it, and one check runs at a time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use planner::{Action, DirectedLink, Leg, LegRole, Plan, WorkerRank};
use prometheus::IntCounterVec;
use serde_json::json;
use vocabulary::{Blocks, DpRank, Tokens, WorkerHealth, WorkerId};

use crate::leg_outcome::LegError;
use crate::legs::Legs;
use crate::prompts::{RetainedPrompt, RetainedPromptStore};
use crate::receipt::unix_ms;
use crate::request_id::new_request_id;
use crate::transfer_check::{
    CheckDecision, DisabledLinkRecord, GreedySample, TransferCheckOutcome, TransferCheckSettings, TransferCheckState,
};
use crate::upstream::UpstreamError;
use crate::worker_client::WorkerClient;

const ANSWER_TOKENS: u32 = 4;
const COMPLETIONS_PATH: &str = "/v1/completions";

/// KV that moved between two workers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CompletedTransfer {
    /// Source and target.
    pub(crate) link: DirectedLink,
    pub(crate) rank: DpRank,
    /// Number of leading blocks that were moved; `None` when the whole prompt was.
    pub(crate) blocks: Option<Blocks>,
    pub(crate) action: Action,
}

impl CompletedTransfer {
    /// Returns the transfer in a plan's handoff, if it has one.
    pub(crate) fn of(plan: &Plan) -> Option<Self> {
        let handoff = plan.handoffs().next()?;
        let link = DirectedLink { from: handoff.source.worker, to: handoff.target.worker };
        Some(Self { link, rank: handoff.target.rank, blocks: handoff.blocks, action: plan.action })
    }
}

/// Checks transfers. Clones share the results.
#[derive(Clone, Debug)]
pub struct TransferChecker {
    checks: Arc<TransferCheckState>,
    client: WorkerClient,
    prompts: Arc<RetainedPromptStore>,
    config: TransferCheckSettings,
    outcomes: IntCounterVec,
}

impl TransferChecker {
    /// Returns a checker that keeps its results in `checks`, and counts their outcomes.
    pub fn new(
        (checks, outcomes): (Arc<TransferCheckState>, IntCounterVec),
        client: WorkerClient,
        prompts: Arc<RetainedPromptStore>,
        config: TransferCheckSettings,
    ) -> Self {
        Self { checks, client, prompts, config, outcomes }
    }

    /// Checks a complete transfer, if a check is due.
    pub(crate) fn check_if_due(&self, transfer: CompletedTransfer, kept: &Arc<RetainedPrompt>) {
        let CompletedTransfer { link, action, .. } = transfer;
        let prompt = kept.chain.tokens;
        let moved = transfer.blocks.map_or(prompt, |blocks| blocks.tokens(kept.chain.block));
        let permit = match self.checks.decide(link, self.config.sample_every, (moved, prompt)) {
            CheckDecision::NotDue => return,
            CheckDecision::Busy => return self.count(TransferCheckOutcome::Skipped),
            CheckDecision::Check(permit) => permit,
        };
        let (checker, kept) = (self.clone(), kept.clone());
        tokio::spawn(async move {
            let check = TransferCheck { checker: &checker, transfer, prompt: &kept, computed: AtomicU64::new(0) };
            let outcome = check.run().await;
            let computed = Tokens(check.computed.into_inner());
            checker.count(outcome);
            if outcome == TransferCheckOutcome::Mismatch {
                checker.bar(DisabledLinkRecord { link, action, since_unix_ms: unix_ms() });
            }
            checker.checks.settle(permit, computed);
        });
    }

    fn count(&self, outcome: TransferCheckOutcome) {
        self.outcomes.with_label_values(&[outcome.as_ref()]).inc();
    }

    fn bar(&self, barred: DisabledLinkRecord) {
        if self.checks.bar(barred) {
            let DirectedLink { from, to } = barred.link;
            let [source, target] = [from, to].map(|id| self.client.endpoint_name(id));
            tracing::warn!(%source, %target, action = %barred.action,
                "a transfer check failed: KV that moved over this link gives another answer than a recomputed prompt. The link is \
                 disabled. Repair the transfer, restart the target, whose cache holds such blocks, then run `ownerserve ctl link enable`");
        }
    }
}

struct TransferCheck<'a> {
    checker: &'a TransferChecker,
    transfer: CompletedTransfer,
    prompt: &'a Arc<RetainedPrompt>,
    /// Tokens that engines have computed for the check.
    computed: AtomicU64,
}

impl TransferCheck<'_> {
    async fn run(&self) -> TransferCheckOutcome {
        match self.compare().await {
            Ok(outcome) | Err(outcome) => outcome,
        }
    }

    async fn compare(&self) -> Result<TransferCheckOutcome, TransferCheckOutcome> {
        let stored = self.prompt.clone();
        let read = move || Some(stored.tokens.read(&stored.chain)?.into_owned());
        let ids = self.checker.prompts.read(read).await.map_err(|_| TransferCheckOutcome::Failed)?;
        let CompletedTransfer { link: DirectedLink { to: target, .. }, rank: target_rank, .. } = self.transfer;
        let leg = |worker, rank| Leg::new(LegRole::Serve, WorkerRank { worker, rank });
        if !Legs::without_client(&self.checker.client).serves_alone(target) {
            return Err(TransferCheckOutcome::NotComparable);
        }
        let at_target = leg(target, target_rank);
        let (read, found) = self.ask(&at_target, &ids, self.prompt.salt.as_deref()).await?;
        if found.is_some_and(|found| found + self.block_size() < self.transferred_tokens(&ids)) {
            return Err(TransferCheckOutcome::NotComparable);
        }
        let noise = self.checker.config.logprob_tolerance;
        let prompt = Tokens(ids.len() as u64);
        let mut computed: Option<GreedySample> = None;
        // The target computes last and decides: its own rounding is the same as when it read the KV.
        for worker in self.reference_worker().into_iter().chain([target]) {
            let rank = if worker == target { target_rank } else { DpRank(0) };
            let salt = format!("check-{}", new_request_id());
            let referee = Leg { computed_tokens: prompt, ..leg(worker, rank) };
            let (said, found) = self.ask(&referee, &ids, Some(&salt)).await?;
            if found.is_some_and(|found| found > Tokens::ZERO) {
                return Err(TransferCheckOutcome::NotComparable);
            }
            if read.agrees_with(&said, noise) {
                return Ok(if computed.is_none() {
                    TransferCheckOutcome::Match
                } else {
                    TransferCheckOutcome::Inconclusive
                });
            }
            if computed.as_ref().is_some_and(|computed| !computed.agrees_with(&said, noise)) {
                return Ok(TransferCheckOutcome::Inconclusive);
            }
            computed = Some(said);
        }
        Ok(TransferCheckOutcome::Mismatch)
    }

    /// Returns what a worker generates, and how much of the prompt was cached there, where it reports that.
    async fn ask(
        &self,
        leg: &Leg,
        ids: &[u32],
        salt: Option<&str>,
    ) -> Result<(GreedySample, Option<Tokens>), TransferCheckOutcome> {
        let mut body = json!({
            "model": self.prompt.model.to_string(), "prompt": ids, "max_tokens": ANSWER_TOKENS, "temperature": 0,
            "ignore_eos": true, "logprobs": 2, "stream": false,
        });
        if let Some(salt) = salt {
            body["cache_salt"] = json!(salt);
        }
        let legs = Legs::without_client(&self.checker.client);
        let counted = legs.dispatch(leg);
        let answer = legs.send_whole(leg, COMPLETIONS_PATH, body.to_string().into()).await;
        drop(counted);
        let found = answer.as_ref().ok().and_then(|(_, answer)| answer.usage?.cached);
        self.computed.fetch_add(computed_tokens(ids, answer.as_ref().map(|_| found)).0, Relaxed);
        let (text, _) = answer.map_err(|_| TransferCheckOutcome::Failed)?;
        Ok((GreedySample::read(&text).ok_or(TransferCheckOutcome::Failed)?, found))
    }

    /// Number of leading tokens that came over the link.
    fn transferred_tokens(&self, ids: &[u32]) -> Tokens {
        let blocks = self.transfer.blocks;
        blocks.map_or(Tokens(ids.len() as u64), |blocks| blocks.tokens(self.prompt.chain.block))
    }

    /// Tokens that an engine may recompute although it has them: the block in which the prompt ends.
    fn block_size(&self) -> Tokens {
        let fleet = self.checker.client.fleet().snapshot();
        let target = fleet.iter().find(|view| view.id == self.transfer.link.to);
        target.map_or(Tokens::ZERO, |view| view.capacity.block).max(self.prompt.chain.block)
    }

    /// Returns the worker that computes the prompt beside the target: preferably one outside of the link with little
    /// load.
    fn reference_worker(&self) -> Option<WorkerId> {
        let fleet = self.checker.client.fleet().snapshot();
        let can = fleet.iter().filter(|view| {
            view.id != self.transfer.link.to
                && view.health == WorkerHealth::Ready
                && view.role.decodes()
                && view.link.as_ref().is_none_or(|link| link.carries.computes_prompts())
                && view.models.contains(&self.prompt.model)
        });
        let best = can.min_by_key(|view| (view.id == self.transfer.link.from, view.load.requests(), view.id));
        best.map(|view| view.id)
    }
}

/// Tokens that a worker computed of a prompt, given its cache hit: all of them where it does not report the hit, or
/// where it may have failed after computing.
fn computed_tokens(ids: &[u32], found: Result<Option<Tokens>, &LegError>) -> Tokens {
    match found {
        Err(
            LegError::UnknownWorker
            | LegError::OverBudget(_)
            | LegError::Upstream(UpstreamError::Connect(_) | UpstreamError::Unsendable(_)),
        ) => Tokens::ZERO,
        Err(_) => Tokens(ids.len() as u64),
        Ok(found) => Tokens(ids.len() as u64) - found.unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_check_is_charged_for_everything_possibly_computed() {
        let ids = [7; 100];
        assert_eq!(computed_tokens(&ids, Ok(Some(Tokens(64)))), Tokens(36));
        assert_eq!(computed_tokens(&ids, Ok(None)), Tokens(100), "it does not tell");
        assert_eq!(computed_tokens(&ids, Err(&LegError::Broken)), Tokens(100));
        assert_eq!(
            computed_tokens(&ids, Err(&LegError::Upstream(UpstreamError::Connect("refused".into())))),
            Tokens::ZERO
        );
    }
}
