//! Guardrail: detects actions that make sessions slower than the fallback policy would. Sessions are assigned to two
//! arms at random: one is served by the planner's choice; in the other (*control*) the plan is made, but the fallback
//! policy serves. Only steps for which the planner chose the same action are compared.
//!
//! A sample is `x = ln(first token + 50 ms)`; the 50 ms keep negligible differences from counting. Steps of one session
//! are correlated, so sessions are counted: each by the mean of its steps, an average over about its last sixteen. For
//! the newest sessions of both arms, with means m, variances s^2 and numbers n, `d = m_own - m_control` and
//! `v = s_own^2 / n_own + s_control^2 / n_control`, an action is slower when
//!
//! ```text
//! d > sqrt(2 v (v + t) / t * (ln(1 / alpha) + ln((v + t) / v) / 2))        t = 0.3^2, alpha = 0.0001
//! ```
//!
//! This is where the mixture sequential probability ratio test of normal data rejects (Johari, Koomen, Pekelis and
//! Walsh, Always valid inference: continuous monitoring of A/B tests, Operations Research 70, 2022), so it may be
//! evaluated after every step. Its proof does not cover that the variance is estimated, that means still move and that
//! old sessions leave; a test below counts false alarms under all of these.

use std::collections::VecDeque;

use parking_lot::Mutex;
use planner::Action;
use serde::Serialize;
use strum::{AsRefStr, VariantArray};
use utoipa::ToSchema;
use vocabulary::{Micros, SessionId};

use vocabulary::UtcTime;

/// Negligible difference, in microseconds.
const NEGLIGIBLE_MICROS: f64 = 50_000.0;
/// Sessions kept per action and arm, and how many each arm needs before there is a result.
const MAX_SESSIONS: usize = 512;
const MIN_SESSIONS: usize = 20;
/// A session without a step for a day no longer counts.
const SESSION_TTL_MS: u64 = 24 * 3_600_000;
/// Minimum weight of a session's newest step in its mean.
const MIN_STEP_WEIGHT: f64 = 1.0 / 16.0;
/// Minimum standard deviation between the sessions of one arm.
const MIN_SPREAD: f64 = 0.1;
/// Standard deviation of the expected slowdowns, as logarithms.
const EXPECTED_EFFECT_SPREAD: f64 = 0.3;
/// Probability of a false alarm per action, under the assumptions of the proof.
const ALPHA: f64 = 0.0001;

/// Arm of the comparison that a session belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, AsRefStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum ComparisonArm {
    /// Planned, but served by the fallback policy.
    Control,
    /// Served as planned.
    Treatment,
}

/// Whether an action can be disabled: the first two are what remains without all others.
pub fn can_be_disabled(action: Action) -> bool {
    !matches!(action, Action::ColocatedPrefill | Action::DecodeContinuation)
}

/// A complete step of a compared session.
#[derive(Clone, Copy, Debug)]
pub struct StepSample {
    /// The action that the planner chose first, whoever served the step.
    pub action: Action,
    /// The session of the step.
    pub session: SessionId,
    /// Arm of the session.
    pub arm: ComparisonArm,
    /// Time from arrival to the first token; to the end where the answer was not streamed.
    pub latency: Micros,
    /// When the step ended, milliseconds since 1970.
    pub at_unix_ms: u64,
}

/// How one action compares with the bypass.
#[derive(Clone, Copy, PartialEq, Serialize, ToSchema, Debug, Default)]
#[schema(as = GuardrailComparison)]
pub struct ArmComparisonReport {
    /// Sessions that the bypass served, of the newest 512 for which the action was chosen.
    pub control_sessions: usize,
    /// Sessions that the action served, of the newest 512.
    pub treatment_sessions: usize,
    /// Time to first token with the action, divided by that with the bypass; above 1 the action is slower. Null until both
    /// have 20 sessions.
    pub ttft_ratio: Option<f64>,
    /// Lower bound of `ttft_ratio` by a confidence sequence, which is valid at every step.
    pub ttft_ratio_lower: Option<f64>,
    /// Upper bound of `ttft_ratio`, likewise.
    pub ttft_ratio_upper: Option<f64>,
    /// When it became significantly slower; null while it is not.
    pub slower_since: Option<UtcTime>,
}

/// Change of a comparison caused by a step.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum GuardrailEvent {
    /// The action is significantly slower than the bypass.
    Slower(ArmComparisonReport),
    /// The action is no longer slower, with enough sessions in both arms. Only for actions that cannot be disabled: a
    /// disabled one gets no new steps.
    Recovered(ArmComparisonReport),
}

/// Mean of one session's steps.
#[derive(Clone, Copy, Debug)]
struct SessionMean {
    id: SessionId,
    mean: f64,
    steps: f64,
    at_unix_ms: u64,
}

/// Sessions of one arm; the one with the newest step is last.
#[derive(Clone, Debug, Default)]
struct ArmSessions(VecDeque<SessionMean>);

/// Number, mean and variance of the sessions' means.
#[derive(Clone, Copy, Debug)]
struct Moments {
    count: f64,
    mean: f64,
    variance: f64,
}

impl ArmSessions {
    fn add(&mut self, step: &StepSample, sample: f64) {
        let known = self.0.iter().rposition(|session| session.id == step.session).and_then(|at| self.0.remove(at));
        let mut session = known.unwrap_or(SessionMean { id: step.session, mean: sample, steps: 0.0, at_unix_ms: 0 });
        session.steps += 1.0;
        session.mean += MIN_STEP_WEIGHT.max(1.0 / session.steps) * (sample - session.mean);
        session.at_unix_ms = step.at_unix_ms;
        self.0.push_back(session);
        if self.0.len() > MAX_SESSIONS {
            self.0.pop_front();
        }
    }

    fn expire(&mut self, now: u64) {
        while self.0.front().is_some_and(|oldest| now.saturating_sub(oldest.at_unix_ms) > SESSION_TTL_MS) {
            self.0.pop_front();
        }
    }

    fn moments(&self) -> Option<Moments> {
        let count = self.0.len() as f64;
        let enough = self.0.len() >= MIN_SESSIONS;
        let mean = enough.then(|| self.0.iter().map(|session| session.mean).sum::<f64>() / count)?;
        let squares = self.0.iter().map(|session| (session.mean - mean).powi(2)).sum::<f64>();
        Some(Moments { count, mean, variance: (squares / (count - 1.0)).max(MIN_SPREAD * MIN_SPREAD) })
    }
}

/// Logarithm of a ratio, with the radius of its confidence interval.
#[derive(Clone, Copy, Debug)]
struct LogRatioInterval {
    mean: f64,
    radius: f64,
}

impl LogRatioInterval {
    fn of(own: Moments, control: Moments) -> Self {
        let (v, t) = (
            own.variance / own.count + control.variance / control.count,
            EXPECTED_EFFECT_SPREAD * EXPECTED_EFFECT_SPREAD,
        );
        let radius = (2.0 * v * (v + t) / t * (-ALPHA.ln() + ((v + t) / v).ln() / 2.0)).sqrt();
        Self { mean: own.mean - control.mean, radius }
    }
}

#[derive(Clone, Debug, Default)]
struct ArmComparison {
    control: ArmSessions,
    active: ArmSessions,
    slower_since: Option<u64>,
}

impl ArmComparison {
    fn difference(&self) -> Option<LogRatioInterval> {
        Some(LogRatioInterval::of(self.active.moments()?, self.control.moments()?))
    }

    fn report(&self) -> ArmComparisonReport {
        let difference = self.difference();
        let ratio = |of: fn(LogRatioInterval) -> f64| difference.map(|difference| of(difference).exp());
        ArmComparisonReport {
            control_sessions: self.control.0.len(),
            treatment_sessions: self.active.0.len(),
            ttft_ratio: ratio(|d| d.mean),
            ttft_ratio_lower: ratio(|d| d.mean - d.radius),
            ttft_ratio_upper: ratio(|d| d.mean + d.radius),
            slower_since: self.slower_since.map(UtcTime::from_unix_ms),
        }
    }

    fn add(&mut self, step: &StepSample) -> Option<GuardrailEvent> {
        if self.slower_since.is_some() && can_be_disabled(step.action) {
            // The step began before the action was disabled.
            return None;
        }
        let sample = (step.latency.0 as f64 + NEGLIGIBLE_MICROS).ln();
        match step.arm {
            ComparisonArm::Control => self.control.add(step, sample),
            ComparisonArm::Treatment => self.active.add(step, sample),
        }
        [&mut self.control, &mut self.active].into_iter().for_each(|arm| arm.expire(step.at_unix_ms));
        let difference = self.difference();
        match self.slower_since {
            None if difference.is_some_and(|d| d.mean > d.radius) => {
                self.slower_since = Some(step.at_unix_ms);
                Some(GuardrailEvent::Slower(self.report()))
            }
            // Well inside the bound, so that the result does not flap. Too few sessions show nothing, in either
            // direction.
            Some(_) if difference.is_some_and(|d| d.mean < d.radius / 2.0) => {
                self.slower_since = None;
                Some(GuardrailEvent::Recovered(self.report()))
            }
            _ => None,
        }
    }
}

/// Comparisons of all actions, over this router's sessions since it started.
#[derive(Debug, Default)]
pub struct Guardrail(Mutex<[ArmComparison; Action::ALL.len()]>);

impl Guardrail {
    /// Adds a complete step of a compared session. Returns what changed by it.
    pub fn add(&self, step: &StepSample) -> Option<GuardrailEvent> {
        self.0.lock()[step.action as usize].add(step)
    }

    /// Returns the comparison of an action.
    pub fn of(&self, action: Action) -> ArmComparisonReport {
        self.0.lock()[action as usize].report()
    }

    /// Resets the comparison of an action that is enabled again.
    pub fn reset(&self, action: Action) {
        self.0.lock()[action as usize] = ArmComparison::default();
    }

    /// Returns the actions that are significantly slower.
    pub fn slower_actions(&self) -> Vec<(Action, ArmComparisonReport)> {
        let all = self.0.lock();
        let slower = |action: &Action| all[*action as usize].slower_since.is_some();
        Action::ALL.into_iter().filter(slower).map(|action| (action, all[action as usize].report())).collect()
    }
}

#[cfg(test)]
mod tests;
