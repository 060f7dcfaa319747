//! How far a simulation is: a bar on a terminal, nothing elsewhere.

use std::io::{IsTerminal as _, Write as _};

/// Characters of the bar.
const WIDTH: usize = 30;

/// The bar of all runs together.
pub(crate) struct Progress {
    runs: usize,
    begun: usize,
    name: String,
    terminal: bool,
}

impl Progress {
    pub(crate) fn new(runs: usize) -> Self {
        Self { runs, begun: 0, name: String::new(), terminal: std::io::stderr().is_terminal() }
    }

    pub(crate) fn begin(&mut self, name: &str) {
        self.begun += 1;
        name.clone_into(&mut self.name);
        self.show(0, 1);
    }

    pub(crate) fn show(&self, over: usize, all: usize) {
        if self.terminal {
            self.write(&format!("\r\x1b[K{}", self.line(over, all)));
        }
    }

    pub(crate) fn end(&self) {
        if self.terminal {
            self.write("\r\x1b[K");
        }
    }

    fn line(&self, over: usize, all: usize) -> String {
        let part = over as f64 / all.max(1) as f64;
        let whole = (self.begun.saturating_sub(1) as f64 + part) / self.runs.max(1) as f64;
        let full = ((whole * WIDTH as f64) as usize).min(WIDTH);
        let bar: String = (0..WIDTH).map(|at| if at < full { '#' } else { '.' }).collect();
        format!("[{bar}] {:>3.0} % {} ({} of {})", whole * 100.0, self.name, self.begun, self.runs)
    }

    /// A terminal that has gone away is no reason to stop.
    fn write(&self, text: &str) {
        let mut terminal = std::io::stderr().lock();
        let _ = terminal.write_all(text.as_bytes()).and_then(|()| terminal.flush());
    }
}

#[cfg(test)]
mod tests {
    use super::Progress;

    #[test]
    fn the_bar_is_as_full_as_all_runs_together() {
        let progress = Progress { runs: 4, begun: 2, name: "oracle at 24".into(), terminal: false };
        assert_eq!(
            progress.line(50, 100),
            format!("[{}{}]  38 % oracle at 24 (2 of 4)", "#".repeat(11), ".".repeat(19))
        );
        let last = Progress { begun: 4, ..progress };
        assert_eq!(last.line(1, 1), format!("[{}] 100 % oracle at 24 (4 of 4)", "#".repeat(30)));
    }
}
