//! Progress view during a run: redrawn in place on a terminal, otherwise one line every few seconds.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use vocabulary::WorkerRole;

use super::ComparedPolicy;
use super::measure::{MetricsScrape, percentile_ms};
use super::report::{action_mix, actions, duplicate_factor, owner_hit_rate};
use super::session::ReplayProgress;

/// Interval between two redraws.
pub(super) const REDRAW_INTERVAL: Duration = Duration::from_millis(500);
/// Redraws per plain line.
const REDRAWS_PER_PLAIN_LINE: usize = 10;

/// Fixed properties of a run.
pub(super) struct RunDescription {
    pub policy: ComparedPolicy,
    pub sessions: usize,
    /// Workers by address, in display order.
    pub workers: Vec<(String, WorkerRole)>,
}

/// State of a run at one moment: what clients saw, and what the router reports.
pub(super) struct RunSnapshot<'a> {
    pub run: &'a RunDescription,
    pub elapsed: Duration,
    pub progress: &'a ReplayProgress,
    pub router: &'a MetricsScrape,
}

impl RunSnapshot<'_> {
    pub(super) fn line(&self) -> String {
        let first = self.first_tokens();
        format!(
            "{:<16} {:>5.1} s  {} of {} sessions over, {} steps, {} errors, first token p50 {:.0} ms, owner hits {:.0} %",
            self.run.policy,
            self.elapsed.as_secs_f64(),
            self.progress.finished,
            self.run.sessions,
            self.progress.steps.len(),
            self.errors(),
            percentile_ms(&first, 0.5),
            owner_hit_rate(&self.progress.steps) * 100.0,
        )
    }

    pub(super) fn screen(&self) -> Vec<String> {
        let first = self.first_tokens();
        let seen: u64 = self.served().map(|served| served.cached_tokens).sum();
        let prompt_tokens: u64 = self.served().map(|served| served.prompt_tokens).sum();
        let cached = if prompt_tokens > 0 { seen as f64 * 100.0 / prompt_tokens as f64 } else { 0.0 };
        let running = self.progress.started - self.progress.finished;
        let mut lines = vec![
            format!("OwnerServe demo · {} · {:.1} s", self.run.policy, self.elapsed.as_secs_f64()),
            format!("sessions     {running} running · {} over · {} in all", self.progress.finished, self.run.sessions),
            format!("steps        {} · {} errors", self.progress.steps.len(), self.errors()),
            format!(
                "first token  p50 {:.1} ms · p99 {:.1} ms",
                percentile_ms(&first, 0.5),
                percentile_ms(&first, 0.99)
            ),
            format!(
                "owner hits   {:.1} % · prompt from cache {cached:.1} % · duplicate factor {:.2}",
                owner_hit_rate(&self.progress.steps) * 100.0,
                duplicate_factor(self.router),
            ),
            format!("actions      {}", action_mix(&actions(self.router))),
            format!("first token  {}", self.predicted_and_measured()),
        ];
        lines.extend(self.owners());
        lines
    }

    fn served(&self) -> impl Iterator<Item = &super::client::StepMeasurement> {
        self.progress.steps.iter().filter_map(|step| step.outcome.as_ref().ok())
    }

    fn first_tokens(&self) -> Vec<Duration> {
        self.served().map(|served| served.first_token).collect()
    }

    fn errors(&self) -> usize {
        self.progress.steps.iter().filter(|step| step.outcome.is_err()).count()
    }

    fn predicted_and_measured(&self) -> String {
        let mean = |name: &str| {
            let count = self.router.sum(&format!("{name}_count"), &[]);
            (count > 0.0).then(|| self.router.sum(&format!("{name}_sum"), &[]) * 1e3 / count)
        };
        let predicted = mean("ownerserve_predicted_time_to_first_token_seconds");
        let seen = mean("ownerserve_time_to_first_token_seconds");
        let word = |mean: Option<f64>| mean.map_or("-".to_owned(), |mean| format!("{mean:.1} ms"));
        format!("predicted {} · seen {} (means, at the router)", word(predicted), word(seen))
    }

    /// One line per worker: the steps it served and the sessions it owns, i.e. whose last step it served.
    fn owners(&self) -> Vec<String> {
        let mut steps: BTreeMap<&str, usize> = BTreeMap::new();
        let mut last: BTreeMap<usize, &str> = BTreeMap::new();
        for step in &self.progress.steps {
            let worker = step.outcome.as_ref().ok().and_then(|served| served.worker.as_deref());
            if let Some(worker) = worker {
                *steps.entry(worker).or_default() += 1;
                last.insert(step.session, worker);
            }
        }
        let line = |(address, role): &(String, WorkerRole)| {
            let steps = steps.get(address.as_str()).copied().unwrap_or(0);
            let owned = last.values().filter(|owner| *owner == address).count();
            format!("  {address:<16} {:<8} {steps:>5} steps · owns {owned:>3} sessions", role.as_str())
        };
        self.run.workers.iter().map(line).collect()
    }
}

/// View on standard output.
pub(super) struct LiveView {
    screen: ProgressBar,
    frames: usize,
}

/// Creates the progress bar on standard output.
fn screen() -> ProgressBar {
    let style = ProgressStyle::with_template("{msg}").expect("the template is fixed and valid");
    ProgressBar::with_draw_target(None, ProgressDrawTarget::stdout()).with_style(style)
}

impl LiveView {
    /// Creates a view on standard output.
    pub(super) fn new() -> LiveView {
        LiveView { screen: screen(), frames: 0 }
    }

    pub(super) fn show(&mut self, moment: &RunSnapshot) {
        if !self.screen.is_hidden() {
            self.screen.set_message(moment.screen().join("\n"));
        } else if self.frames.is_multiple_of(REDRAWS_PER_PLAIN_LINE) {
            print_text(&moment.line());
        }
        self.frames += 1;
    }

    /// Replaces the current display by lines.
    pub(super) fn print_lines(&mut self, lines: &[String]) {
        std::mem::replace(self, LiveView::new()).screen.finish_and_clear();
        print_text(&lines.join("\n"));
    }
}

fn print_text(text: &str) {
    // Write errors are ignored: the run continues without a reader, and its report may go to a file.
    let _ = writeln!(std::io::stdout().lock(), "{text}");
}

#[cfg(test)]
#[path = "view_tests.rs"]
mod tests;
