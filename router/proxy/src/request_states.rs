//! States of a request between the steps of the pipeline: located, classified, planned.

use std::sync::Arc;

use planner::{
    ActionSet, AdmissionDecision, AdmissionRequest, ClassificationInputs, Decision, DirectedLink, HeadRelation, Plan,
    RankMemorySnapshot, RequestProfile, SessionView, StepKind, WorkerRank, lcm,
};
use vocabulary::{Blocks, Micros, Overlap, Owner, PrefixId, SessionId, Tokens, WorkerId, WorkerView};

use crate::guardrail::ComparisonArm;
use crate::identified_request::IdentifiedRequest;
use crate::receipt::LookupEvidence;
use vocabulary::RoutingMode;

/// A request whose session, owner and block residency are known.
#[derive(Debug)]
pub struct LocatedRequest {
    /// The identified request.
    pub identified: IdentifiedRequest,
    /// Key that is stable over a conversation's steps: the client's session name, else the conversation fingerprint.
    pub affinity_key: SessionId,
    /// The session: the one that the client names, the one that the chain extends, or a new one.
    pub session: SessionView,
    /// The session that this one forks or was spawned from, according to the chain or the client.
    pub parent: Option<SessionId>,
    /// What the lookup is based on.
    pub evidence: LookupEvidence,
    /// The head that the step extends: the intent's base.
    pub base: PrefixId,
    /// The head whose history the client rewrote.
    pub rewrites: Option<PrefixId>,
    /// How the prompt relates to the session's head.
    pub relation: HeadRelation,
    /// Blocks that the prompt shares with the session's head.
    pub shared_blocks: Blocks,
    /// Time since the session's last step.
    pub idle: Option<Micros>,
    /// How many blocks of the prompt each worker holds.
    pub overlaps: Vec<Overlap>,
    /// The fleet at this moment, with how reliably each worker's blocks of this prompt are known.
    pub workers: Arc<[WorkerView]>,
}

impl LocatedRequest {
    /// Returns the largest overlap that any worker has.
    pub fn deepest_overlap(&self) -> Blocks {
        self.overlaps.iter().map(|overlap| overlap.blocks).max().unwrap_or_default()
    }

    /// Returns the whole blocks that every engine of the model can keep.
    pub fn sealable_blocks(&self) -> Blocks {
        sealable_blocks_of(&self.identified, &self.workers)
    }

    /// Returns the leading tokens known from before; zero where the engine does not use its cache.
    pub fn reused_tokens(&self) -> Tokens {
        if self.evidence.cache_not_readable.is_some() {
            return Tokens::ZERO;
        }
        self.deepest_overlap().max(self.shared_blocks).tokens(self.identified.prompt.chain.block)
    }
}

/// Whole blocks of the prompt, rounded down to a multiple of every engine's own block size: engines keep and drop whole
/// blocks only.
pub(crate) fn sealable_blocks_of(identified: &IdentifiedRequest, workers: &[WorkerView]) -> Blocks {
    let chain = &identified.prompt.chain;
    let serving = workers.iter().filter(|worker| worker.models.contains(&identified.request.model));
    let units = serving.map(|worker| worker.capacity.block.whole_blocks(chain.block).0.max(1));
    let unit = units.fold(1, lcm);
    Blocks(chain.blocks().0 / unit * unit)
}

/// Returns the worker incarnation that serves the step, the plan's target; `None` when it has left the fleet.
pub fn serving_owner(located: &LocatedRequest, plan: &Plan) -> Option<Owner> {
    owner_at(located, plan.answer_leg().at())
}

/// Returns the worker incarnation at a rank; `None` when it has left the fleet.
pub(crate) fn owner_at(located: &LocatedRequest, WorkerRank { worker, rank }: WorkerRank) -> Option<Owner> {
    let worker = located.workers.iter().find(|view| view.id == worker)?;
    Some(Owner { worker: worker.id, incarnation: worker.incarnation, rank })
}

/// A located step with its kind and what the planner is asked.
#[derive(Debug)]
pub struct ClassifiedStep {
    /// The located request.
    pub located: LocatedRequest,
    /// The kind of the step.
    pub kind: StepKind,
    /// What is asked of the workers.
    pub request: RequestProfile,
    /// Routing mode for this step.
    pub mode: RoutingMode,
    /// The arm of the guardrail's comparison that its session belongs to.
    pub arm: Option<ComparisonArm>,
    /// Actions that are disabled at run time.
    pub disabled: ActionSet,
    /// Why a broken answer cannot resume by token ids; `None` where it can. It may still be generated again.
    pub resume_blocker: Option<ResumeBlocker>,
    /// Links over which no KV may move.
    pub disabled_links: Vec<DirectedLink>,
}

/// Why an answer cannot resume at another worker by token ids.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ResumeBlocker {
    /// Resuming is disabled.
    Disabled,
    /// The answer is delivered whole; it is requested again as a whole.
    NotStreamed,
    /// The prompt is so long that returning its ids would delay the first token.
    PromptTooLong,
    /// The response is stored at one engine, or the engine runs its tools.
    EngineState,
    /// `/v1/messages` and `/v1/responses`: their events carry more than text.
    Endpoint,
    /// Several choices, prompts or beams.
    SeveralChoices,
    /// Log probabilities of the answer or the prompt.
    Logprobs,
    /// An answer with a constrained format.
    Format,
    /// Penalties, checks and stop texts that depend on the answer so far.
    HistoryDependent,
    /// Reasoning that is not returned.
    HiddenReasoning,
    /// Tools that the answer may call.
    Tools,
    /// A prompt with more than text.
    NotText,
}

impl ResumeBlocker {
    /// Returns the reason in words, to follow "because".
    pub fn reason(self) -> &'static str {
        match self {
            ResumeBlocker::Disabled => "that is switched off",
            ResumeBlocker::NotStreamed => "it comes whole",
            ResumeBlocker::PromptTooLong => "its prompt is too long for its token ids to be told",
            ResumeBlocker::EngineState => "its engine keeps it, or runs its tools",
            ResumeBlocker::Endpoint => "answers of this endpoint do not go on by token ids",
            ResumeBlocker::SeveralChoices => "the request asks for several choices",
            ResumeBlocker::Logprobs => "the request asks for log probabilities or an echo",
            ResumeBlocker::Format => "the request holds it to a format",
            ResumeBlocker::HistoryDependent => {
                "the request has penalties or stop texts for which what was said before counts"
            }
            ResumeBlocker::HiddenReasoning => "the request leaves thoughts out",
            ResumeBlocker::Tools => "the request has tools",
            ResumeBlocker::NotText => "the prompt is more than text",
        }
    }
}

/// A plan for a step, with what it is based on.
#[derive(Debug)]
pub struct PlannedStep {
    /// The plan that is executed.
    pub plan: Plan,
    /// The planner's decision, where it was asked; in mode `shadow` its plan is not the one that is executed.
    pub decision: Option<Decision>,
    /// What the planner was asked instead of the step's own lengths, where those are estimates and exceeded the limit.
    pub shortened_ask: Option<RequestProfile>,
    /// Workers that were excluded: those that failed earlier in this request, and the ejected ones.
    pub excluded: Vec<WorkerId>,
    /// The ejected workers among the excluded.
    pub ejected: Vec<WorkerId>,
    /// What the occupancy model reported about KV that would be evicted.
    pub rank_memory: Vec<RankMemorySnapshot>,
    /// Cost of a start to other sessions, where the planner was asked, and the admission decision where the step may be
    /// queued.
    pub admission: Option<(AdmissionRequest, Option<AdmissionDecision>)>,
}

impl PlannedStep {
    /// Builds a planned step that is not admitted.
    pub(crate) fn of(
        plan: Plan,
        (decision, rank_memory, asking): (Option<Decision>, Vec<RankMemorySnapshot>, Option<AdmissionRequest>),
        (shortened_ask, excluded): (Option<RequestProfile>, &[WorkerId]),
    ) -> Self {
        let admission = asking.map(|asking| (asking, None));
        let (excluded, ejected) = (excluded.to_vec(), Vec::new());
        Self { plan, decision, shortened_ask, excluded, ejected, rank_memory, admission }
    }

    /// Whether the step is to be queued and planned again later.
    pub fn must_wait(&self) -> bool {
        matches!(self.admission, Some((_, Some(AdmissionDecision::Hold { .. }))))
    }
}

/// Collects the facts that determine the kind of a step.
pub fn step_facts(located: &LocatedRequest) -> ClassificationInputs {
    ClassificationInputs {
        prompt_tokens: located.identified.total_tokens(),
        reused_tokens: located.reused_tokens(),
        relation: located.relation,
        idle: located.idle,
    }
}
