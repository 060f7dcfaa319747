//! Whether an action makes sessions slower than the bypass would: sessions are dealt to two arms by chance, in one the planner's choice
//! serves, in the other (*control*) it is made and the bypass serves. Compared are steps for which the planner chose the same action.
//!
//! A sample is `x = ln(first token + 50 ms)`; the 50 ms keep what does not matter from counting. Steps of one session are alike, so that
//! sessions are what is counted: each by the mean of its steps, which forgets all but some sixteen. Of the newest sessions of both arms, with
//! means m, variances s^2 and numbers n, `d = m_own - m_control` and `v = s_own^2 / n_own + s_control^2 / n_control`, an action is slower when
//!
//! ```text
//! d > sqrt(2 v (v + t) / t * (ln(1 / alpha) + ln((v + t) / v) / 2))        t = 0.3^2, alpha = 0.0001
//! ```
//!
//! which is where the mixture sequential probability ratio test of normal data rejects (Johari, Koomen, Pekelis and Walsh, Always valid
//! inference: continuous monitoring of A/B tests, Operations Research 70, 2022): one may look after every step. That the variance is
//! estimated, that means still move and that old sessions leave is not in its proof; a test below counts false alarms with all of that.

use std::collections::VecDeque;

use parking_lot::Mutex;
use planner::Action;
use serde::Serialize;
use strum::{AsRefStr, VariantArray};
use utoipa::ToSchema;
use vocabulary::{Micros, SessionId};

/// What does not matter, in microseconds.
const NEGLIGIBLE_MICROS: f64 = 50_000.0;
/// Sessions that are remembered of each action in each arm, and how many there have to be before anything is said.
const MAX_SESSIONS: usize = 512;
const MIN_SESSIONS: usize = 20;
/// A session that made no step for a day says nothing of today.
const SESSION_TTL_MS: u64 = 24 * 3_600_000;
/// Weight of a session's newest step in its mean, at least.
const MIN_STEP_WEIGHT: f64 = 1.0 / 16.0;
/// Sessions of one arm differ by at least this.
const MIN_SPREAD: f64 = 0.1;
/// What slowdowns are expected: their spread, as a logarithm.
const EXPECTED_EFFECT_SPREAD: f64 = 0.3;
/// Chance of a false word for one action, if everything were as the proof wants it.
const ALPHA: f64 = 0.0001;

/// On which side of the comparison a session is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, AsRefStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum Arm {
    /// Planned, and served by the bypass.
    Control,
    /// Served as planned.
    Own,
}

/// Whether an action can be given up: the first two are what remains then.
pub fn can_be_disabled(action: Action) -> bool {
    !matches!(action, Action::ColocatedPrefill | Action::DecodeContinuation)
}

/// A complete step of a compared session.
#[derive(Clone, Copy, Debug)]
pub struct StepSample {
    /// What the planner chose for it first, whoever served it.
    pub action: Action,
    /// Whose it is.
    pub session: SessionId,
    /// How that one is served.
    pub arm: Arm,
    /// From arrival to the first token; to the end where it was not streamed.
    pub latency: Micros,
    /// When it ended, milliseconds since 1970.
    pub at_unix_ms: u64,
}

/// How one action compares with the bypass.
#[derive(Clone, Copy, PartialEq, Serialize, ToSchema, Debug, Default)]
pub struct ComparisonReport {
    /// Sessions that the bypass served, of the newest 512 for which it was chosen.
    pub control_sessions: usize,
    /// Sessions that it served, of as many.
    pub own_sessions: usize,
    /// First-token times with it by those with the bypass; none before both have 20 sessions. Above 1 it is slower.
    pub ratio: Option<f64>,
    /// The ratio is not below this, nor above the next, by a confidence sequence: it may be looked at after every step.
    pub ratio_low: Option<f64>,
    /// See `ratio_low`.
    pub ratio_high: Option<f64>,
    /// Since when it is significantly slower, milliseconds since 1970; none where it is not.
    pub slower_since_unix_ms: Option<u64>,
}

/// What changed with a step.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum GuardrailEvent {
    /// The action is significantly slower than the bypass.
    Slower(ComparisonReport),
    /// It is not any more, of as many sessions as it takes to say so. Only of one that cannot be reverted: of others no new steps come.
    Recovered(ComparisonReport),
}

/// The mean of one session's steps.
#[derive(Clone, Copy, Debug)]
struct SessionMean {
    id: SessionId,
    mean: f64,
    steps: f64,
    at_unix_ms: u64,
}

/// One arm's sessions, the one that made a step last at the end.
#[derive(Clone, Debug, Default)]
struct ArmSessions(VecDeque<SessionMean>);

/// Number, mean and variance of sessions.
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

/// A logarithm of a ratio, and how far off it may be.
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
struct ActionComparison {
    control: ArmSessions,
    active: ArmSessions,
    slower_since: Option<u64>,
}

impl ActionComparison {
    fn difference(&self) -> Option<LogRatioInterval> {
        Some(LogRatioInterval::of(self.active.moments()?, self.control.moments()?))
    }

    fn report(&self) -> ComparisonReport {
        let difference = self.difference();
        let ratio = |of: fn(LogRatioInterval) -> f64| difference.map(|difference| of(difference).exp());
        ComparisonReport {
            control_sessions: self.control.0.len(),
            own_sessions: self.active.0.len(),
            ratio: ratio(|d| d.mean),
            ratio_low: ratio(|d| d.mean - d.radius),
            ratio_high: ratio(|d| d.mean + d.radius),
            slower_since_unix_ms: self.slower_since,
        }
    }

    fn add(&mut self, step: &StepSample) -> Option<GuardrailEvent> {
        if self.slower_since.is_some() && can_be_disabled(step.action) {
            // It began before the action was given up.
            return None;
        }
        let sample = (step.latency.0 as f64 + NEGLIGIBLE_MICROS).ln();
        match step.arm {
            Arm::Control => self.control.add(step, sample),
            Arm::Own => self.active.add(step, sample),
        }
        [&mut self.control, &mut self.active].into_iter().for_each(|arm| arm.expire(step.at_unix_ms));
        let difference = self.difference();
        match self.slower_since {
            None if difference.is_some_and(|d| d.mean > d.radius) => {
                self.slower_since = Some(step.at_unix_ms);
                Some(GuardrailEvent::Slower(self.report()))
            }
            // Well within, so that it does not come and go. Too few sessions say nothing, neither way.
            Some(_) if difference.is_some_and(|d| d.mean < d.radius / 2.0) => {
                self.slower_since = None;
                Some(GuardrailEvent::Recovered(self.report()))
            }
            _ => None,
        }
    }
}

/// The comparison of every action, of this router's sessions since it started.
#[derive(Debug, Default)]
pub struct Guardrail(Mutex<[ActionComparison; Action::ALL.len()]>);

impl Guardrail {
    /// A step of a compared session is complete. What is known now that was not before.
    pub fn add(&self, step: &StepSample) -> Option<GuardrailEvent> {
        self.0.lock()[step.action as usize].add(step)
    }

    /// How an action compares.
    pub fn of(&self, action: Action) -> ComparisonReport {
        self.0.lock()[action as usize].report()
    }

    /// Forgets what is known of an action: it is switched on again.
    pub fn reset(&self, action: Action) {
        self.0.lock()[action as usize] = ActionComparison::default();
    }

    /// Those that are significantly slower.
    pub fn slower_actions(&self) -> Vec<(Action, ComparisonReport)> {
        let all = self.0.lock();
        let slower = |action: &Action| all[*action as usize].slower_since.is_some();
        Action::ALL.into_iter().filter(slower).map(|action| (action, all[action as usize].report())).collect()
    }
}

#[cfg(test)]
mod tests;
