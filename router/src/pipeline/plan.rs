//! Classify and plan: what kind of step it is, and the cheapest way to serve it that is allowed.
//!
//! The thinking is the planner's; here its inputs are put together and the mode is obeyed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use parking_lot::Mutex;
use planner::{
    Actions, Ask, Asking, BarredLink, Decision, Disabled, Inputs, NoPlan, Plan, Policy, RankMemory, Rule, StepFacts,
    StepKind, TransferBar, Transfers, Verdict, classify as kind_of,
};
use vocabulary::{Knowledge, Tokens, WorkerId, WorkerView};

use super::locate::Located;
use super::resumable::{Unresumable, unresumable};
use super::steering::Mode;
use super::tenure::{Account, Now, Tenure};
use crate::ahead::Ahead;
use crate::config::{Config, ResumeConfig};
use crate::error::{ApiError, shortened};
use crate::gateway::Gateway;
use crate::guardrail::Arm;
use crate::outliers::{Outliers, Trials};
use crate::retries::{RetryBudget, Share};

/// The two policies that may be in force for a step, and what is kept between steps.
#[derive(Debug)]
pub struct Policies {
    own: Policy,
    bypass: Policy,
    turn: AtomicU64,
    account: Account,
    /// What tries after the first may cost.
    pub retries: RetryBudget,
    /// Workers whose requests fail.
    pub outliers: Arc<Mutex<Outliers>>,
    /// What may be sent before a step asks for it.
    pub ahead: Ahead,
    /// Which broken streams go on elsewhere.
    pub resume: ResumeConfig,
}

impl Policies {
    /// As configured: the planner's policy, and the rule that routes where the planner does not. One tenant gets `share` of the
    /// tries after the first.
    pub fn new(config: &Config, share: Share) -> Self {
        let policy = &config.planner;
        let own = Policy { rule: Rule::Own, ..policy.clone() };
        let bypass = Policy { rule: config.steering.bypass, ..policy.clone() };
        Self {
            own,
            bypass,
            turn: AtomicU64::new(0),
            account: Account::new(policy.admission),
            retries: RetryBudget::new(config.retries, share),
            outliers: Arc::new(Mutex::new(Outliers::new(config.outliers))),
            ahead: Ahead::new(config.ahead),
            resume: config.resume,
        }
    }

    /// The planner's own.
    pub fn own(&self) -> &Policy {
        &self.own
    }

    /// The account of whose KV lies where, and who waits because of it.
    pub fn account(&self) -> &Account {
        &self.account
    }
}

/// A step with its kind.
#[derive(Debug)]
pub struct Classified {
    /// The step.
    pub located: Located,
    /// Its kind.
    pub step: StepKind,
    /// What is asked of the workers.
    pub ask: Ask,
    /// Who decides for it.
    pub mode: Mode,
    /// On which side of the guardrail's comparison its session is.
    pub arm: Option<Arm>,
    /// Actions that are switched off at run time.
    pub disabled: Actions,
    /// What keeps a broken answer from going on elsewhere.
    pub unresumable: Option<Unresumable>,
    /// Links that are barred.
    pub barred: Vec<BarredLink>,
}

/// What a step is to be done by.
#[derive(Debug)]
pub struct Planned {
    /// What is carried out.
    pub plan: Plan,
    /// The planner's decision, where it was asked; in mode `shadow` its plan is not the one that is carried out.
    pub decision: Option<Decision>,
    /// What the planner was asked in place of the step's own lengths, which were only guessed.
    pub shortened: Option<Ask>,
    /// Who was left out: who had failed before in this request, and who is ejected.
    pub excluded: Vec<WorkerId>,
    /// Of these, who is ejected.
    pub ejected: Vec<WorkerId>,
    /// What the account said of whose KV would be pushed out.
    pub memory: Vec<RankMemory>,
    /// What starting would cost others, where the planner was asked, and what it said to that where a step may wait.
    pub admission: Option<(Asking, Option<Verdict>)>,
    /// Who finds out by it whether they are well; none where nobody does.
    pub trials: Option<Trials>,
    /// The step's place in the account of whose KV lies where; none while it is to wait.
    pub tenure: Option<Tenure>,
}

impl Planned {
    /// Nothing of it is begun or noted.
    fn of(
        plan: Plan,
        (decision, memory, asking): (Option<Decision>, Vec<RankMemory>, Option<Asking>),
        (shortened, excluded): (Option<Ask>, &[WorkerId]),
    ) -> Self {
        let admission = asking.map(|asking| (asking, None));
        let (excluded, ejected, trials, tenure) = (excluded.to_vec(), Vec::new(), None, None);
        Self { plan, decision, shortened, excluded, ejected, memory, admission, trials, tenure }
    }

    /// Whether the step is to wait, and be planned anew.
    pub fn waits(&self) -> bool {
        matches!(self.admission, Some((_, Some(Verdict::Hold { .. }))))
    }
}

/// What makes the kind of a step.
pub fn facts(located: &Located) -> StepFacts {
    StepFacts {
        prompt: located.prefixed.tokens(),
        reused: located.reused(),
        relation: located.relation,
        idle: located.idle,
    }
}

/// Gives the step its kind.
pub fn classify(gateway: &Gateway, located: Located) -> Classified {
    let prefixed = &located.prefixed;
    let prompt = prefixed.tokens();
    let step = kind_of(&facts(&located), &gateway.policies.own.thresholds);
    let request = &prefixed.request;
    let ask = Ask {
        model: request.model.clone(),
        adapter: None,
        prompt,
        longest: (!prefixed.others.is_empty()).then(|| prefixed.longest()),
        answer: gateway.policies.account.expected_answer(located.session.id, request.answer),
        growth: gateway.policies.account.expected_growth(),
        block: prefixed.prompt.chain.block,
        transfers: transfers(&located),
    };
    let steering = gateway.steering.get();
    let (mode, arm) = (steering.mode_of(located.pin), steering.arm_of(located.pin));
    let barred = gateway.decisions.correctness.links();
    let unresumable = unresumable(&located.prefixed, gateway.policies.resume);
    Classified { mode, arm, disabled: steering.disabled, barred, step, ask, located, unresumable }
}

fn transfers(located: &Located) -> Transfers {
    use prefix::FallbackReason::Multimodal;
    let bar = located.prefixed.request.bar.or(match located.prefixed.fallback() {
        None => None,
        Some(Multimodal) => Some(TransferBar::MultimodalContent),
        Some(_) => Some(TransferBar::UnknownTokens),
    });
    bar.map_or(Transfers::Allowed, Transfers::Forbidden)
}

/// Plans a step, and notes where it goes unless it is to wait. `failed` did already in this request.
pub fn plan(gateway: &Gateway, step: &Classified, failed: &[WorkerId]) -> Result<Planned, ApiError> {
    let barred = gateway.barred();
    match barred.is_empty() {
        true => planned(gateway, step, failed),
        false => planned(gateway, step, &[failed, &barred].concat()).map_err(|error| match error {
            ApiError::WorkerFailed { .. } if failed.is_empty() => {
                ApiError::SaltsIgnored { model: shortened(&step.ask.model.0) }
            }
            error => error,
        }),
    }
}

fn planned(gateway: &Gateway, step: &Classified, failed: &[WorkerId]) -> Result<Planned, ApiError> {
    let Policies { account, outliers, .. } = &gateway.policies;
    account.compare(gateway.fleet());
    // Planned, admitted and noted at one moment: the next one finds what this one takes, trials included.
    let mut now = account.now();
    let mut ejected = outliers.lock().out(&step.located.workers, Instant::now());
    ejected.retain(|worker| !failed.contains(worker));
    let mut planned = match ejected.is_empty() {
        true => decide(gateway, step, (failed, &now)),
        // Rather one that may be sick than none.
        false => decide(gateway, step, (&[failed, &ejected].concat(), &now))
            .map(|planned| Planned { ejected, ..planned })
            .or_else(|_| decide(gateway, step, (failed, &now))),
    }?;
    if may_wait(step, (failed, &planned))
        && let Some((asking, verdict)) = &mut planned.admission
    {
        *verdict = Some(now.turns().admit(step.located.prefixed.request.incoming.id, *asking));
    }
    if !planned.waits() {
        planned.trials = Trials::begin(outliers, planned.plan.workers());
        planned.tenure = account.begin(now, step, &planned.plan);
    }
    Ok(planned)
}

/// Whether a step may be told to wait: not where the bypass serves it, where it has failed already, and where it is only
/// guessed what it finds and so what it takes.
fn may_wait(step: &Classified, (failed, planned): (&[WorkerId], &Planned)) -> bool {
    let is_exact = |view: &WorkerView| view.id == planned.plan.target() && view.knowledge == Knowledge::Exact;
    step.mode == Mode::Own && failed.is_empty() && step.located.workers.iter().any(is_exact)
}

/// What is carried out, and the planner's decision where it was asked; not in the account yet.
fn decide(
    gateway: &Gateway,
    step: &Classified,
    (excluded, account): (&[WorkerId], &Now<'_>),
) -> Result<Planned, ApiError> {
    let (policies, shapes) = (&gateway.policies, gateway.roster.shapes());
    let mut pinned = step.located.session.clone();
    pinned.id = step.located.pin;
    let shortened = std::cell::RefCell::new(None);
    let decide = |policy: &Policy, session, turn| {
        let planned = |ask: &Ask| {
            let inputs = Inputs {
                step: step.step,
                ask,
                attention: step.located.prefixed.model.attention.as_deref(),
                session,
                workers: &step.located.workers,
                shapes: &shapes,
                overlaps: &step.located.overlaps,
                account: planner::Account { tenancy: account.tenancy(), now: account.now },
                excluded,
                policy,
                disabled: Disabled { actions: step.disabled, links: &step.barred },
                turn,
            };
            let decision = planner::plan(&inputs)?;
            let (memory, asking) = match policy.rule {
                Rule::Own => (account.tenancy().told_of(&inputs, &decision), Some(Asking::of(&inputs, &decision))),
                _ => (Vec::new(), None),
            };
            Ok((decision, memory, asking))
        };
        match planned(&step.ask) {
            // Tokens were only guessed from bytes: whether they fit is the engine's to say.
            Err(NoPlan::TooLong { longest }) if step.located.prefixed.fallback().is_some() => {
                let ask = Ask { prompt: longest - Tokens(1), longest: None, answer: Tokens(1), ..step.ask.clone() };
                planned(shortened.borrow_mut().insert(ask))
            }
            planned => planned,
        }
        .map_err(|why| no_plan(why, step))
    };
    let own = || decide(&policies.own, &step.located.session, 0);
    let next = || policies.turn.fetch_add(1, Ordering::Relaxed);
    let bypass = || decide(&policies.bypass, &pinned, next()).map(|(decision, ..)| decision.plan);
    let (plan, decision) = match step.mode {
        Mode::Own => {
            let own = own()?;
            (own.0.plan, Some(own))
        }
        Mode::Sticky => (bypass()?, None),
        // Whatever the planner says in the shadow, the answer does not depend on it.
        Mode::Shadow => (bypass()?, own().ok()),
    };
    let told = decision.map(|(decision, memory, asking)| (Some(decision), memory, asking));
    Ok(Planned::of(plan, told.unwrap_or_default(), (shortened.into_inner(), excluded)))
}

fn no_plan(why: NoPlan, step: &Classified) -> ApiError {
    match why {
        // Before every worker was asked once, nobody can say that a model does not exist.
        NoPlan::UnknownModel { model } if all_asked(&step.located.workers) => {
            ApiError::UnknownModel { model: shortened(&model.0) }
        }
        NoPlan::UnknownModel { model } => ApiError::NoWorker { model: shortened(&model.0) },
        NoPlan::NoneReady => ApiError::NoWorker { model: shortened(&step.ask.model.0) },
        NoPlan::AllExcluded => ApiError::WorkerFailed { detail: "every worker that could serve this failed".into() },
        NoPlan::TooLong { longest } => ApiError::TooLong {
            param: step.located.prefixed.request.endpoint.input(),
            longest,
            prompt: step.ask.longest.unwrap_or(step.ask.prompt),
        },
    }
}

fn all_asked(workers: &[WorkerView]) -> bool {
    !workers.is_empty() && workers.iter().all(|worker| !worker.models.is_empty())
}
