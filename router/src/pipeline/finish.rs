//! What is to be done when an answer is over: the commit, the receipt, the figures. Once a request, whatever its end.

use std::sync::Arc;
use std::time::Instant;

use planner::{Action, Candidate, Case, Handoff, Transfers};
use tokio::sync::OwnedSemaphorePermit;
use vocabulary::{Blocks, Bytes, Knowledge, Micros, Overlap, Tokens, WorkerId, WorkerView};
use workers_shim::dialect::Usage;
use workers_shim::events::{KnownBy, Served};
use workers_shim::fleet::InFlight;

use super::commit::{commit, withdraw};
use super::guard::guard;
use super::knowledge::is_converted_by_guess;
use super::plan::{Classified, Planned, facts};
use super::prompts::Kept;
use super::receipt::{Attempt, Ending, Known, Receipt, Seen};
use super::steering::Mode;
use super::turns::Waited;
use super::underway::{Failures, RequestOutcome, settle_failures};
use super::verify::{Transfer, sample, unix_ms};
use crate::gateway::Gateway;
use crate::guardrail::{Arm, Step};
use crate::identity::agreement::{Counts, Finds, LATE};
use crate::outliers;
use crate::quotas::Came;

/// A request on its way to its end.
pub struct Finish {
    /// Everything that is shared.
    pub gateway: Arc<Gateway>,
    /// The step.
    pub step: Classified,
    /// What the planner chose first, where it was asked.
    pub chosen: Option<Action>,
    /// The plan that serves it.
    pub planned: Planned,
    /// Every try, the newest last.
    pub attempts: Vec<Attempt>,
    /// How it waited before, where it did.
    pub waited: Option<Waited>,
    /// The request as the target's load counts it; none when nobody serves it.
    pub in_flight: Option<InFlight>,
    /// When the first byte of the answer was there.
    pub first_byte: Option<Instant>,
    /// The answer's status.
    pub status: u16,
    /// Tokens of the answer that reached us, counted by events where the engine does not tell.
    pub delivered: Tokens,
    /// Who broke off inside the answer so far.
    pub(super) failures: Failures,
}

/// How many times what was expected an engine may count before it is not believed.
const BELIEVED: u64 = 16;
/// What an engine may always count: images that a prompt only names, templates, the answer to a request without a bound.
const ALWAYS_BELIEVED: Tokens = Tokens(65_536);

/// Most tokens that an engine is believed to count where so many were expected.
pub(crate) fn most_believed(expected: Tokens) -> Tokens {
    Tokens(expected.0.saturating_mul(BELIEVED)).max(ALWAYS_BELIEVED)
}

/// The same for an answer whose request sets no bound.
pub(crate) const UNBOUNDED_ANSWER: Tokens = Tokens(BELIEVED * ALWAYS_BELIEVED.0);

impl Finish {
    /// Who answers.
    pub fn server(&self) -> WorkerId {
        self.planned.plan.target()
    }

    /// The end. `usage` is what the engine counted.
    pub fn end(mut self, ending: Ending, usage: Option<Usage>) {
        let usage = usage.filter(|usage| self.believes(usage));
        let counted = usage.map(|usage| self.computed_here(usage));
        // The speed of one worker is not learnt from an answer of two.
        let is_whole = self.attempts.last().is_some() && !self.is_resumed();
        if let (Some(in_flight), Some(counted), true) = (&mut self.in_flight, counted, is_whole) {
            in_flight.complete(&counted);
        }
        let located = &self.step.located;
        match (self.step.mode, ending) {
            // The ledger is not asked, and so not told either.
            (Mode::Sticky, _) => {}
            // It was not announced.
            _ if self.attempts.is_empty() => {}
            (_, Ending::Complete) => {
                let since = Instant::now();
                commit(&self.gateway, located, &self.planned.plan);
                let seconds = self.gateway.metrics.plans.step.with_label_values(&["commit"]);
                seconds.observe(since.elapsed().as_secs_f64());
            }
            _ => withdraw(&self.gateway, located),
        }
        if let Some(tenure) = self.planned.tenure.take() {
            match ending {
                Ending::Complete => tenure.served(usage),
                Ending::Refused => tenure.refused(),
                Ending::Failed | Ending::Broken => tenure.failed(),
                // What was computed until then stays there.
                Ending::ClientLeft => drop(tenure),
            }
        }
        if ending == Ending::Complete {
            let leg = &self.planned.plan.decode;
            let by = located.prefixed.fallback().map_or(KnownBy::Tokens, |_| KnownBy::Bytes);
            let prompts: Vec<_> = located.prefixed.chains().collect();
            self.gateway.fleet().note_routed(leg.worker, leg.rank, Served { prompts: &prompts, by });
            outliers::answered(&self.gateway, &located.workers, (&self.planned.plan, self.attempts.last()));
        }
        let failures = std::mem::take(&mut self.failures);
        match ending {
            Ending::Complete => settle_failures(&self.gateway, &self.step, failures, RequestOutcome::Answered),
            // Nobody knows how it would have gone on.
            Ending::ClientLeft => drop(failures),
            _ => settle_failures(&self.gateway, &self.step, failures, RequestOutcome::Unanswered),
        }
        if let Some(at) = self.first_byte {
            self.gateway.metrics.plans.step.with_label_values(&["stream"]).observe(at.elapsed().as_secs_f64());
        }
        self.settle(ending, usage);
        let seen = self.seen(ending, usage);
        self.count(&seen);
        self.hold_against_price(&seen);
        self.hold_against_control(&seen);
        let gateway = self.gateway.clone();
        if ending == Ending::Complete && self.step.ask.transfers == Transfers::Allowed {
            let session = self.step.located.session.id;
            if let Some(kept) = Kept::of(&mut self.step).map(Arc::new) {
                if let Some(transfer) = Transfer::of(&self.planned.plan).filter(|_| seen.moved > Bytes::ZERO) {
                    sample(&gateway, transfer, &kept);
                }
                gateway.policies.ahead.begins(&gateway, (&self.step, &kept), (self.server(), usage));
                gateway.remembered.prompts.keep(session, kept);
            }
        }
        let (receipt, case) = self.receipt(seen);
        gateway.decisions.file(receipt, case);
    }

    fn settle(&self, ending: Ending, usage: Option<Usage>) {
        let Some(reserved) = &self.step.located.prefixed.request.incoming.reserved else { return };
        // Who left may have been cut off by what stands between us, or by our own end.
        let came = if ending == Ending::Complete { Came::ToItsEnd } else { Came::Short };
        reserved.settle(self.used(ending, usage), came);
    }

    /// Tokens that count against the tenant's quota: what the engine counted, and of an answer whose end it did not tell at
    /// least the prompt and what was delivered.
    fn used(&self, ending: Ending, usage: Option<Usage>) -> Tokens {
        match (ending, usage) {
            (Ending::Complete | Ending::Refused | Ending::Failed, Some(usage)) => usage.prompt + usage.completion,
            (Ending::Refused | Ending::Failed, None) => Tokens::ZERO,
            (_, usage) => {
                let Usage { prompt, completion, .. } = usage.unwrap_or_default();
                prompt.max(self.step.ask.prompt) + completion.max(self.delivered)
            }
        }
    }

    /// Whether an engine can have counted this. One that cannot is counted, and taken for an engine that counts nothing.
    fn believes(&self, usage: &Usage) -> bool {
        let asked = self.step.located.prefixed.request.answer.unwrap_or_default();
        let is_possible = usage.prompt <= most_believed(self.step.ask.prompt)
            && usage.completion <= most_believed(asked.max(self.delivered)).max(UNBOUNDED_ANSWER);
        if !is_possible {
            self.gateway.metrics.requests.usage_disbelieved.inc();
            let (prompt, completion) = (usage.prompt.0, usage.completion.0);
            tracing::warn!(worker = %self.server(), prompt, completion, "a worker counts more tokens than a request can have");
        }
        is_possible
    }

    /// The usage as it teaches the target's speed: what was pulled from another worker was not computed here, whatever
    /// the engine counts as cached then.
    fn computed_here(&self, usage: Usage) -> Usage {
        match self.planned.plan.handoff {
            Some(Handoff::RemotePrefill { .. }) => {
                Usage { cached: Some(usage.prompt - self.planned.plan.decode.tokens_computed), ..usage }
            }
            _ => usage,
        }
    }

    /// Whether more than one worker gave the answer.
    fn is_resumed(&self) -> bool {
        self.attempts.iter().any(|attempt| attempt.resumed.is_some())
    }

    fn seen(&self, ending: Ending, usage: Option<Usage>) -> Seen {
        let plan = &self.planned.plan;
        let incoming = &self.step.located.prefixed.request.incoming;
        let arrived = incoming.arrived;
        Seen {
            ending,
            status: self.status,
            // The last plan's price is not that of the first one's first token.
            predicted: self.planned.decision.as_ref().filter(|_| !self.is_resumed()).map(|_| plan.because.total),
            first_token: self.first_byte.map(|at| Micros::of(at - arrived)),
            total: Micros::of(arrived.elapsed()),
            predicted_cached: plan.decode.tokens_cached,
            cached: usage.map(|usage| usage.cached.unwrap_or_default()),
            answered: usage.map(|usage| usage.completion),
            moved: self.moved(),
            repeated: incoming.reserved.as_ref().is_some_and(|reserved| reserved.is_repeated()),
            engine_disagrees: self.counts_disagreeing(ending, usage),
            cache_disagrees: self.finds_disagreeing(ending, usage),
        }
    }

    /// What is filed of it, and what the planner was asked, where it was.
    fn receipt(self, seen: Seen) -> (Receipt, Option<Case>) {
        let (located, Planned { decision, shortened, excluded, memory, .. }) = (self.step.located, self.planned);
        let facts = facts(&located);
        let chain = &located.prefixed.prompt.chain;
        let tokens = |blocks: Blocks| blocks.tokens(chain.block);
        let known = Known {
            session: located.session.id,
            named_by: located.prefixed.request.session_key.as_ref().map(|key| key.source),
            fallback: located.prefixed.fallback().map(Into::into),
            rung: located.prefixed.rung.map(Into::into),
            distrusted: located.prefixed.model.is_distrusted(),
            owner: located.session.owner,
            epoch: located.session.epoch,
            prompt: located.prefixed.tokens(),
            estimated: located.prefixed.fallback().is_some(),
            sealed: tokens(located.session.sealed),
            deepest_overlap: tokens(located.deepest_overlap()),
            grounds: located.grounds,
        };
        let incoming = &located.prefixed.request.incoming;
        let gateway = &self.gateway;
        let receipt = Receipt {
            request: incoming.id,
            at_unix_ms: unix_ms().saturating_sub(seen.total.0 / 1000),
            tenant: incoming.tenant.clone(),
            model: located.prefixed.request.model.clone(),
            known,
            mode: self.step.mode,
            control: self.step.arm == Some(Arm::Control),
            soft_state: gateway.remembered.state.trouble(),
            decision,
            waited: self.waited,
            attempts: self.attempts,
            seen: Some(seen),
        };
        let case = Case {
            facts,
            ask: shortened.unwrap_or(self.step.ask),
            session: located.session,
            workers: located.workers,
            overlaps: located.overlaps,
            excluded,
            memory: Some(memory),
            disabled: self.step.disabled,
            barred: self.step.barred,
        };
        let case = receipt.decision.is_some().then_some(case);
        (receipt, case)
    }

    fn count(&self, seen: &Seen) {
        // Of one that left while it waited nothing was executed.
        if self.attempts.is_empty() {
            return;
        }
        let metrics = &self.gateway.metrics;
        let (plan, located) = (&self.planned.plan, &self.step.located);
        let kind = self.step.step.as_str();
        if let Some(took) = seen.first_token {
            metrics.requests.first_token.with_label_values(&[kind]).observe(took.duration().as_secs_f64());
            // Beside what was seen, so that the two can be compared.
            if let Some(predicted) = seen.predicted {
                metrics.plans.predicted.observe(predicted.duration().as_secs_f64());
            }
        }
        metrics.plans.actions.with_label_values(&[plan.action.as_str()]).inc();
        metrics.plans.kinds.with_label_values(&[kind]).inc();
        if let Some(owner) = located.session.owner {
            metrics.plans.owner_lookups.inc();
            metrics.plans.owner_hits.inc_by(u64::from(owner.worker == plan.target()));
        }
        for remark in self.attempts.iter().flat_map(|attempt| &attempt.remarks) {
            metrics.plans.fallback.with_label_values(&[remark.as_ref()]).inc();
        }
        if self.is_guessed() {
            metrics.plans.fallback.with_label_values(&["converted_by_guess"]).inc();
        }
        if let Some(reason) = located.prefixed.fallback() {
            metrics.plans.fallback.with_label_values(&[reason.as_ref()]).inc();
        }
        if seen.ending == Ending::Complete {
            self.count_tokens(seen);
        }
    }

    /// Holds the first token of a step that one worker served alone against its price.
    fn hold_against_price(&self, seen: &Seen) {
        let Some(decision) = self.planned.decision.as_ref().filter(|_| seen.ending == Ending::Complete) else { return };
        let plan = &self.planned.plan;
        // In the shadow another plan was carried out than the planner's; its price is among the candidates.
        let legs = (plan.prefill.worker, plan.decode.worker);
        let at = |one: &&Candidate| one.handoff.is_none() && (one.prefill.worker, one.decode.worker) == legs;
        let served = decision.candidates.iter().find(at);
        let (Some(served), Some(first_token)) = (served, seen.first_token) else { return };
        // Whoever waits here waits for others, and not for this worker.
        let first_token = first_token - self.waiting();
        let is_alone = plan.handoff.is_none() && self.attempts.len() == 1;
        let worker = self.step.located.workers.iter().find(|view| view.id == plan.target());
        let Some(worker) = worker.filter(|_| is_alone) else { return };
        let foretold = served.terms.first_token();
        let metrics = &self.gateway.metrics.decisions;
        let ratio = first_token.0 as f64 / foretold.0.max(1) as f64;
        metrics.foretold.with_label_values(&[plan.action.as_str()]).observe(ratio);
        let life = (worker.id, worker.incarnation);
        let Some(now) = self.gateway.decisions.foretelling.add(life, foretold, first_token) else { return };
        let (worker, ratio) = (&worker.endpoint, format!("{:.2}", now.ratio));
        match now.off {
            Some(off) => tracing::warn!(%worker, off = off.as_ref(), %ratio,
                "its first tokens do not come when prices say: see whether others use it, or its clocks were lowered"),
            None => tracing::info!(%worker, %ratio, "its first tokens come when prices say again"),
        }
    }

    /// Holds the first token of a compared session's step against those of the other arm. What counts is what was chosen
    /// first: that it failed and was replaced is part of what it does to its session.
    fn hold_against_control(&self, seen: &Seen) {
        let (Some(arm), Some(action)) = (self.step.arm, self.chosen) else { return };
        if seen.ending != Ending::Complete {
            return;
        }
        let session = self.step.located.pin;
        // No action is to blame for a wait.
        let took = seen.first_token.unwrap_or(seen.total) - self.waiting();
        guard(&self.gateway, &Step { action, session, arm, took, at_unix_ms: unix_ms() });
    }

    /// How long it waited before it started.
    fn waiting(&self) -> Micros {
        self.waited.map_or(Micros::ZERO, |waited| waited.time)
    }

    /// Whether who served it may read the request otherwise than it was read here.
    fn is_guessed(&self) -> bool {
        is_converted_by_guess(&self.gateway, &self.step.located.prefixed, self.server())
    }

    /// Holds the engine's count of the prompt against ours. Both where they disagree.
    fn counts_disagreeing(&self, ending: Ending, usage: Option<Usage>) -> Option<Counts> {
        let usage = usage.filter(|_| ending == Ending::Complete)?;
        let prefixed = &self.step.located.prefixed;
        let computed = prefixed.countable().filter(|_| !self.is_guessed());
        let counted = Some(usage.prompt).filter(|counted| *counted > Tokens::ZERO);
        let counts = computed.zip(counted).map(|(computed, counted)| Counts { computed, counted });
        let at = (&prefixed.request.model, self.server());
        self.gateway.remembered.identity.agreement.counted(at, counts, Instant::now())
    }

    /// Holds what the engine found in its cache against what its events told. Both where they disagree by now.
    fn finds_disagreeing(&self, ending: Ending, usage: Option<Usage>) -> Option<Finds> {
        let usage = usage.filter(|_| ending == Ending::Complete)?;
        let (model, server) = (&self.step.located.prefixed.request.model, self.server());
        let agreement = &self.gateway.remembered.identity.agreement;
        let finds = self.finds(usage);
        match (finds.filter(|finds| !finds.agree()), agreement.later()) {
            (Some(disagreeing), Some(place)) => self.look_later(disagreeing, place),
            (Some(_), None) => _ = agreement.found((model, server), None, Instant::now()),
            (None, _) => _ = agreement.found((model, server), finds, Instant::now()),
        }
        finds.filter(|finds| !finds.agree())
    }

    /// Lets events that are late come, before what was found counts as another prompt's.
    fn look_later(&self, finds: Finds, place: OwnedSemaphorePermit) {
        let prefixed = &self.step.located.prefixed;
        let (gateway, server) = (self.gateway.clone(), self.server());
        let (model, chain) = (prefixed.request.model.clone(), prefixed.prompt.chain.clone());
        tokio::spawn(async move {
            tokio::time::sleep(LATE).await;
            let told = told_at(server, chain.block, &gateway.index().read().overlaps_of(&chain));
            let finds = Finds { told: finds.told.max(told), ..finds };
            gateway.remembered.identity.agreement.found((&model, server), Some(finds), Instant::now());
            drop(place);
        });
    }

    /// None where the prompt is not certain or one of several, where its blocks may have come from elsewhere, where not all of
    /// the worker's blocks are known, and where the engine does not say what it found.
    fn finds(&self, usage: Usage) -> Option<Finds> {
        let located = &self.step.located;
        let prefixed = &located.prefixed;
        let is_plain = self.attempts.len() == 1 && self.planned.plan.handoff.is_none() && prefixed.others.is_empty();
        prefixed.countable().filter(|_| is_plain && !self.is_guessed())?;
        let fleet = self.gateway.fleet().snapshot();
        let is_it = |worker: &&WorkerView| worker.id == self.server() && worker.knowledge == Knowledge::Exact;
        let capacity = fleet.iter().find(is_it)?.capacity;
        let chain = &prefixed.prompt.chain;
        let told = |overlaps: &[Overlap]| told_at(self.server(), chain.block, overlaps);
        let before =
            Finds { told: told(&located.overlaps), found: usage.cached?, block: capacity.block.max(chain.block) };
        // What others had computed there meanwhile was told meanwhile.
        let now = || told(&self.gateway.index().read().overlaps_of(chain));
        let finds = if before.agree() { before } else { Finds { told: before.told.max(now()), ..before } };
        finds.telling()
    }

    fn count_tokens(&self, seen: &Seen) {
        let plans = &self.gateway.metrics.plans;
        let prompt = self.step.ask.prompt;
        let transferred = self.transferred();
        let cached = (seen.cached.unwrap_or(seen.predicted_cached) - transferred).min(prompt - transferred);
        let computed = prompt - cached - transferred;
        for (source, tokens) in [("cached", cached), ("computed", computed), ("transferred", transferred)] {
            plans.prompt_tokens.with_label_values(&[source]).inc_by(tokens.0);
        }
        plans.overlap.observe(cached.0 as f64);
        plans.completion_tokens.inc_by(seen.answered.unwrap_or_default().0);
        plans.moved_bytes.inc_by(seen.moved.0);
    }

    /// Prompt tokens whose KV came from another worker, as planned.
    fn transferred(&self) -> Tokens {
        let Bytes(token) = self.step.located.prefixed.model.kv_bytes_per_token;
        Tokens(self.moved().0 / token.max(1)).min(self.step.ask.prompt)
    }

    /// Bytes that were to move between workers for the plan that served, unless the transfer came to nothing.
    fn moved(&self) -> Bytes {
        let served = self.attempts.last().map_or(&[][..], |attempt| &attempt.remarks);
        match &self.planned.plan.handoff {
            Some(handoff) if !served.iter().any(|remark| remark.nothing_moved()) => handoff.bytes(),
            _ => Bytes::ZERO,
        }
    }
}

/// How much of a prompt a worker has told that it holds.
fn told_at(worker: WorkerId, block: Tokens, overlaps: &[Overlap]) -> Tokens {
    let there = overlaps.iter().filter(|overlap| overlap.worker == worker);
    there.map(|overlap| overlap.blocks).max().unwrap_or_default().tokens(block)
}

#[cfg(test)]
mod tests;
