//! Comparison of the simulated and the live run.

use std::collections::BTreeMap;

use super::PairedRun;
use crate::ctl::aligned;
use crate::demo::measure::MetricsScrape;
use serde::Serialize;

/// Tolerances: relative difference of mean times to first token, and absolute difference of each action's share.
const TTFT_TOLERANCE: f64 = 0.10;
const ACTION_SHARE_TOLERANCE: f64 = 0.05;

/// A figure of both runs.
#[derive(Clone, Copy, PartialEq, Serialize, Debug, Default)]
pub(super) struct FigurePair {
    simulated: f64,
    live: f64,
}

/// Both runs of all repetitions.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub(super) struct ValidationReport {
    /// Steps served live.
    steps: usize,
    /// Steps whose time to first token counts.
    measured: usize,
    /// Mean time to first token in engine seconds: the mean over the repetitions' means.
    ttft: FigurePair,
    /// Mean of each repetition, by its seed.
    repetitions: BTreeMap<u64, FigurePair>,
    /// Engine seconds per live step, over all steps, spent outside of the engines: proxy, client and this machine.
    outside_engines: f64,
    /// Prompt tokens computed by workers.
    computed_prompt_tokens: FigurePair,
    /// Share of steps per action.
    actions: BTreeMap<String, FigurePair>,
    /// Whether times to first token and all actions are within their tolerances.
    agree: bool,
}

impl FigurePair {
    /// Live divided by simulated, minus one.
    fn relative_error(&self) -> f64 {
        self.live / self.simulated - 1.0
    }
}

impl ValidationReport {
    /// Compares all runs. `slowdown` is the number of real seconds per engine second.
    pub(super) fn of(all: &[PairedRun], slowdown: f64) -> Self {
        let repetitions: BTreeMap<_, _> = all.iter().map(|both| (both.simulation.seed, mean_ttft(both))).collect();
        let mean =
            |of: fn(&FigurePair) -> f64| repetitions.values().map(of).sum::<f64>() / repetitions.len().max(1) as f64;
        let ttft = FigurePair { simulated: mean(|pair| pair.simulated), live: mean(|pair| pair.live) };
        let workers = || all.iter().flat_map(|both| &both.workers);
        let waited = |page: &MetricsScrape| page.sum("vllm:time_to_first_token_seconds_sum", &[]) / slowdown;
        let computed =
            |page: &MetricsScrape| page.sum("vllm:prompt_tokens_by_source_total", &[("source", "local_compute")]);
        let steps = all.iter().map(|both| both.live.steps).sum::<usize>();
        let until_first: f64 = all.iter().map(|both| both.live.ttft_seconds_sum).sum();
        let simulated = all.iter().flat_map(|both| &both.simulation.figures.service.actions);
        let simulated = simulated.map(|(action, steps)| ((*action).to_owned(), *steps as f64));
        let live = all.iter().flat_map(|both| both.router.by("ownerserve_plan_actions_total", "action"));
        let actions = shares(simulated, live);
        let within = actions.values().all(|share| (share.live - share.simulated).abs() <= ACTION_SHARE_TOLERANCE);
        Self {
            steps,
            measured: all.iter().map(|both| both.live.counted_ttft_seconds.len()).sum(),
            ttft,
            outside_engines: (until_first - workers().map(waited).sum::<f64>()) / steps.max(1) as f64,
            computed_prompt_tokens: FigurePair {
                simulated: all.iter().map(|both| both.simulation.figures.reuse.prefill_tokens as f64).sum(),
                live: workers().map(computed).sum(),
            },
            actions,
            agree: within && ttft.relative_error().abs() <= TTFT_TOLERANCE,
            repetitions,
        }
    }

    pub(super) fn table(&self) -> String {
        let word = |holds: bool| if holds { "PASS" } else { "SHORT" }.to_owned();
        let title = ["figure", "simulated", "live", "difference", "aim", ""].map(str::to_owned);
        let mut rows = vec![title];
        let seconds = |name: String, pair: FigurePair| {
            let (simulated, live) = (format!("{:.3}", pair.simulated), format!("{:.3}", pair.live));
            [name, simulated, live, format!("{:+.1} %", 100.0 * pair.relative_error()), "-".to_owned(), String::new()]
        };
        let mut first = seconds("TTFT, mean (s)".to_owned(), self.ttft);
        first[4] = format!("{:.0} %", 100.0 * TTFT_TOLERANCE);
        first[5] = word(self.ttft.relative_error().abs() <= TTFT_TOLERANCE);
        rows.push(first);
        let repetitions = self.repetitions.iter().filter(|_| self.repetitions.len() > 1);
        rows.extend(repetitions.map(|(seed, pair)| seconds(format!("  repetition with seed {seed} (s)"), *pair)));
        let outside = format!("{:.3}", self.outside_engines);
        rows.push(["of which outside of the engines (s)", "-", &outside, "-", "-", ""].map(str::to_owned));
        for (action, share) in &self.actions {
            let off = share.live - share.simulated;
            rows.push([
                format!("{action} (share of steps)"),
                format!("{:.1} %", 100.0 * share.simulated),
                format!("{:.1} %", 100.0 * share.live),
                format!("{:+.1} points", 100.0 * off),
                format!("{:.0} points", 100.0 * ACTION_SHARE_TOLERANCE),
                word(off.abs() <= ACTION_SHARE_TOLERANCE),
            ]);
        }
        let FigurePair { simulated, live } = self.computed_prompt_tokens;
        let off = format!("{:+.1} %", 100.0 * self.computed_prompt_tokens.relative_error());
        let (simulated, live) = (format!("{simulated:.0}"), format!("{live:.0}"));
        rows.push(["prompt tokens computed", &simulated, &live, &off, "-", ""].map(str::to_owned));
        format!("{}{} live steps, {} of them measured\n", aligned(rows), self.steps, self.measured)
    }
}

fn mean_ttft(both: &PairedRun) -> FigurePair {
    let live = &both.live.counted_ttft_seconds;
    let mean = live.iter().sum::<f64>() / live.len().max(1) as f64;
    FigurePair { simulated: both.simulation.figures.ttft.mean, live: mean }
}

/// Shares of each action taken in either run, from counts.
fn shares(
    simulated: impl Iterator<Item = (String, f64)>,
    live: impl Iterator<Item = (String, f64)>,
) -> BTreeMap<String, FigurePair> {
    let mut figures: BTreeMap<String, FigurePair> = BTreeMap::new();
    simulated.for_each(|(action, steps)| figures.entry(action).or_default().simulated += steps);
    live.for_each(|(action, steps)| figures.entry(action).or_default().live += steps);
    let all = |of: fn(&FigurePair) -> f64| figures.values().map(of).sum::<f64>().max(1.0);
    let (simulated, live) = (all(|pair| pair.simulated), all(|pair| pair.live));
    figures.retain(|_, pair| pair.simulated + pair.live > 0.0);
    let share = |pair: FigurePair| FigurePair { simulated: pair.simulated / simulated, live: pair.live / live };
    figures.into_iter().map(|(action, pair)| (action, share(pair))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn action_shares_are_relative_to_the_steps_of_each_run() {
        let taken = |all: &'static [(&str, f64)]| all.iter().map(|(action, steps)| ((*action).to_owned(), *steps));
        let live = taken(&[("a", 2.0), ("c", 1.0), ("d", 0.0), ("a", 1.0)]);
        let all = shares(taken(&[("a", 8.0), ("b", 2.0)]), live);
        let said = all.iter().map(|(name, pair)| (name.as_str(), pair.simulated, pair.live));
        assert_eq!(said.collect::<Vec<_>>(), [("a", 0.8, 0.75), ("b", 0.2, 0.0), ("c", 0.0, 0.25)]);
    }

    #[test]
    fn differences_beyond_the_tolerance_are_marked_short() {
        let pair = |simulated, live| FigurePair { simulated, live };
        let compared = ValidationReport {
            steps: 9,
            measured: 5,
            ttft: pair(1.0, 1.11),
            repetitions: BTreeMap::from([(1, pair(1.0, 1.21)), (2, pair(1.0, 1.01))]),
            outside_engines: 0.02,
            computed_prompt_tokens: pair(10.0, 10.0),
            actions: BTreeMap::from([("a".to_owned(), pair(0.50, 0.54))]),
            agree: false,
        };
        let table = compared.table();
        let lines: Vec<&str> = table.lines().collect();
        assert!(lines[1].contains("+11.0 %") && lines[1].ends_with("SHORT"), "{table}");
        assert!(lines[2].contains("repetition with seed 1") && lines[2].contains("+21.0 %"), "{table}");
        assert!(lines[4].contains("outside of the engines") && lines[4].contains("0.020"), "{table}");
        assert!(lines[5].contains("+4.0 points") && lines[5].ends_with("PASS"), "{table}");
    }
}
