//! Prediction quality: the time to first token predicted when a step was placed, compared with the observed one.

use std::collections::BTreeMap;

use engine_model::runs::Seconds;
use planner::Action;
use serde::Serialize;

use super::times::percentile;

/// Name for all actions together.
pub(super) const ALL_ACTIONS: &str = "all";

/// Samples of predicted and observed times, by action.
#[derive(Debug, Default)]
pub(crate) struct PredictionSamples(BTreeMap<Action, Vec<PredictionSample>>);

#[derive(Clone, Copy, Debug)]
struct PredictionSample {
    predicted: f64,
    observed: f64,
}

impl PredictionSample {
    /// Returns the error relative to the observed time; negative if the prediction was too low.
    fn relative_error(self) -> Option<f64> {
        (self.observed > 0.0).then(|| (self.predicted - self.observed) / self.observed)
    }
}

/// Quality of the predicted times to first token of some steps.
#[derive(Clone, Copy, PartialEq, Serialize, Debug)]
pub struct PredictionQuality {
    /// Number of steps.
    pub steps: usize,
    /// Mean of the predicted seconds.
    pub predicted_mean: f64,
    /// Mean of the observed seconds.
    pub observed_mean: f64,
    /// Median of `|predicted - observed| / observed`.
    pub error_p50: f64,
    /// 90th percentile of the same.
    pub error_p90: f64,
    /// Median of `(predicted - observed) / observed`; negative if the action is predicted too optimistically.
    pub bias_p50: f64,
}

impl PredictionSamples {
    pub(crate) fn add(&mut self, action: Action, (predicted, observed): (Seconds, Seconds)) {
        self.0.entry(action).or_default().push(PredictionSample { predicted: predicted.0, observed: observed.0 });
    }

    /// Returns the quality by action name, and for all steps together.
    pub(crate) fn figures(&self) -> BTreeMap<&'static str, PredictionQuality> {
        let every: Vec<PredictionSample> = self.0.values().flatten().copied().collect();
        let by_action = self.0.iter().map(|(action, pairs)| (action.as_str(), pairs.as_slice()));
        let all = by_action.chain([(ALL_ACTIONS, every.as_slice())]);
        all.filter_map(|(name, pairs)| Some((name, PredictionQuality::of(pairs)?))).collect()
    }
}

impl PredictionQuality {
    /// Returns the mean over several runs, weighted by their steps.
    pub(super) fn mean(runs: &[Self]) -> Self {
        let steps: usize = runs.iter().map(|run| run.steps).sum();
        let of = |part: fn(&Self) -> f64| {
            runs.iter().map(|run| part(run) * run.steps as f64).sum::<f64>() / steps.max(1) as f64
        };
        Self {
            steps,
            predicted_mean: of(|run| run.predicted_mean),
            observed_mean: of(|run| run.observed_mean),
            error_p50: of(|run| run.error_p50),
            error_p90: of(|run| run.error_p90),
            bias_p50: of(|run| run.bias_p50),
        }
    }

    fn of(pairs: &[PredictionSample]) -> Option<Self> {
        let mut offs: Vec<f64> = pairs.iter().filter_map(|pair| pair.relative_error()).collect();
        if offs.is_empty() {
            return None;
        }
        offs.sort_by(f64::total_cmp);
        let bias_p50 = percentile(&offs, 0.5);
        let mut errors: Vec<f64> = offs.iter().map(|off| off.abs()).collect();
        errors.sort_by(f64::total_cmp);
        let mean = |of: fn(&PredictionSample) -> f64| pairs.iter().map(of).sum::<f64>() / pairs.len() as f64;
        Some(Self {
            steps: pairs.len(),
            predicted_mean: mean(|pair| pair.predicted),
            observed_mean: mean(|pair| pair.observed),
            error_p50: percentile(&errors, 0.5),
            error_p90: percentile(&errors, 0.9),
            bias_p50,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prediction_error_and_bias_are_relative_to_the_observed_time() {
        let mut all = PredictionSamples::default();
        for (predicted, observed) in [(1.0, 2.0), (0.9, 1.0), (1.2, 1.0)] {
            all.add(Action::ColocatedPrefill, (Seconds(predicted), Seconds(observed)));
        }
        all.add(Action::ArtifactFetch, (Seconds(3.0), Seconds(1.0)));
        // An observed time of zero has no relative error and does not count.
        all.add(Action::StateMigration, (Seconds(3.0), Seconds::ZERO));
        let figures = all.figures();
        assert_eq!(figures.keys().copied().collect::<Vec<_>>(), [ALL_ACTIONS, "artifact_fetch", "colocated_prefill"]);
        let one = figures["colocated_prefill"];
        assert_eq!(one.steps, 3);
        assert!((one.error_p50 - 0.2).abs() < 1e-9 && (one.error_p90 - 0.5).abs() < 1e-9, "{one:?}");
        assert!((one.bias_p50 + 0.1).abs() < 1e-9, "half of the steps took longer than was predicted: {one:?}");
        assert_eq!((figures["artifact_fetch"].bias_p50, figures[ALL_ACTIONS].steps), (2.0, 5));
    }
}
