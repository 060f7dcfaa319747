//! How far a simulation is: a bar on a terminal, nothing elsewhere.

use crate::ctl::bar;
use indicatif::ProgressBar;

/// Parts of a run that the bar tells apart.
const STEPS_PER_RUN: usize = 1_000;

/// The bar of all runs together.
pub(crate) struct ProgressMeter {
    runs: usize,
    started: usize,
    bar: ProgressBar,
}

impl ProgressMeter {
    pub(crate) fn new(runs: usize) -> Self {
        Self { runs, started: 0, bar: bar("[{bar:30}] {percent:>3} % {msg}", runs * STEPS_PER_RUN) }
    }

    pub(crate) fn begin(&mut self, name: &str) {
        self.started += 1;
        self.bar.set_message(format!("{name} ({} of {})", self.started, self.runs));
        self.show(0, 1);
    }

    pub(crate) fn show(&self, over: usize, all: usize) {
        self.bar
            .set_position((self.started.saturating_sub(1) * STEPS_PER_RUN + over * STEPS_PER_RUN / all.max(1)) as u64);
    }

    pub(crate) fn end(&self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::ProgressMeter;

    #[test]
    fn progress_bar_covers_all_runs_together() {
        let mut progress = ProgressMeter::new(4);
        progress.begin("pooled_memory at 24");
        progress.begin("oracle at 24");
        progress.show(50, 100);
        assert_eq!((progress.bar.position(), progress.bar.length()), (1_500, Some(4_000)));
        assert_eq!(progress.bar.message(), "oracle at 24 (2 of 4)");
    }
}
