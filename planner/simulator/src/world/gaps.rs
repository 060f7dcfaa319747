//! Sessions between their steps, and whether workers have something to do meanwhile.

use std::collections::HashMap;

use engine_model::runs::Seconds;

/// The time so far, by what sessions and workers did in it.
#[derive(Default)]
pub(super) struct Gaps {
    /// Steps of each open session that wait or are served.
    under_way: HashMap<usize, usize>,
    between: usize,
    busy: Vec<bool>,
    workers: usize,
    /// Seconds of sessions between their steps.
    idle: f64,
    /// The same times the workers that were busy.
    used: f64,
    /// Seconds of workers that were busy.
    pub(super) worked: f64,
}

impl Gaps {
    /// Time goes by.
    pub(super) fn pass(&mut self, span: Seconds) {
        let (between, busy) = (self.between as f64, self.workers as f64);
        self.idle += between * span.0;
        self.used += between * busy * span.0;
        self.worked += busy * span.0;
    }

    /// A session is open and has no step yet.
    pub(super) fn opened(&mut self, session: usize) {
        self.under_way.insert(session, 0);
        self.between += 1;
    }

    /// A step wants to be served. Requests on their own have no session that was opened.
    pub(super) fn arrived(&mut self, session: usize) {
        if let Some(steps) = self.under_way.get_mut(&session) {
            self.between -= usize::from(*steps == 0);
            *steps += 1;
        }
    }

    /// A step is over.
    pub(super) fn left(&mut self, session: usize) {
        if let Some(steps) = self.under_way.get_mut(&session) {
            *steps -= 1;
            self.between += usize::from(*steps == 0);
        }
    }

    /// A session is over; so is its last step.
    pub(super) fn closed(&mut self, session: usize) {
        if self.under_way.remove(&session) == Some(0) {
            self.between -= 1;
        }
    }

    /// When something happens next at a worker; one where nothing will is idle.
    pub(super) fn announced(&mut self, worker: usize, next: Option<Seconds>) {
        if self.busy.len() <= worker {
            self.busy.resize(worker + 1, false);
        }
        let before = std::mem::replace(&mut self.busy[worker], next.is_some());
        self.workers = self.workers + usize::from(next.is_some()) - usize::from(before);
    }

    /// The share of so many workers that is busy while a session is between its steps; none when none ever was.
    pub(super) fn use_in_gaps(&self, workers: f64) -> Option<f64> {
        (self.idle > 0.0).then(|| self.used / self.idle / workers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_are_looked_at_while_sessions_pause_and_for_each_of_them() {
        let mut gaps = Gaps::default();
        assert_eq!(gaps.use_in_gaps(2.0), None);
        gaps.opened(1);
        gaps.arrived(1);
        gaps.announced(1, Some(Seconds(4.0)));
        gaps.pass(Seconds(4.0));
        assert_eq!((gaps.use_in_gaps(2.0), gaps.worked), (None, 4.0), "no session paused");
        gaps.left(1);
        // One second of one pause beside a busy worker of two, then three of two pauses beside none.
        gaps.pass(Seconds(1.0));
        gaps.announced(1, None);
        gaps.opened(2);
        gaps.pass(Seconds(3.0));
        assert_eq!(gaps.use_in_gaps(2.0), Some(1.0 / 7.0 / 2.0));
        gaps.closed(1);
        gaps.closed(2);
        gaps.pass(Seconds(9.0));
        assert_eq!(
            (gaps.use_in_gaps(2.0), gaps.worked),
            (Some(1.0 / 14.0), 5.0),
            "sessions that are over do not pause"
        );
    }

    #[test]
    fn a_session_pauses_when_its_last_step_under_way_is_over() {
        let mut gaps = Gaps::default();
        gaps.arrived(7);
        gaps.left(7);
        assert_eq!(gaps.between, 0, "requests on their own have no session");
        gaps.opened(1);
        gaps.arrived(1);
        gaps.arrived(1);
        gaps.left(1);
        assert_eq!(gaps.between, 0);
        gaps.left(1);
        assert_eq!(gaps.between, 1);
    }
}
