//! Utilization of workers while sessions are idle between their steps.

use std::collections::HashMap;

use engine_model::runs::Seconds;

/// Time integrals of idle sessions and busy workers.
#[derive(Default)]
pub(super) struct UtilizationTracker {
    /// Waiting or running steps of each open session.
    running_steps: HashMap<usize, usize>,
    idle_sessions: usize,
    is_busy: Vec<bool>,
    busy_workers: usize,
    /// Integral of the number of idle sessions, in seconds.
    idle_seconds: f64,
    /// Integral of idle sessions times busy workers, in seconds.
    busy_idle_seconds: f64,
    /// Integral of the number of busy workers, in seconds.
    pub(super) busy_seconds: f64,
}

impl UtilizationTracker {
    /// Advances the time by `span`.
    pub(super) fn pass(&mut self, span: Seconds) {
        let (between, busy) = (self.idle_sessions as f64, self.busy_workers as f64);
        self.idle_seconds += between * span.0;
        self.busy_idle_seconds += between * busy * span.0;
        self.busy_seconds += busy * span.0;
    }

    /// Records that a session is open and has no step yet.
    pub(super) fn opened(&mut self, session: usize) {
        self.running_steps.insert(session, 0);
        self.idle_sessions += 1;
    }

    /// Records that a step arrives. Independent requests have no open session.
    pub(super) fn step_arrived(&mut self, session: usize) {
        if let Some(steps) = self.running_steps.get_mut(&session) {
            self.idle_sessions -= usize::from(*steps == 0);
            *steps += 1;
        }
    }

    /// Records that a step is over.
    pub(super) fn step_finished(&mut self, session: usize) {
        if let Some(steps) = self.running_steps.get_mut(&session) {
            *steps -= 1;
            self.idle_sessions += usize::from(*steps == 0);
        }
    }

    /// Records that a session is over, and with it its last step.
    pub(super) fn closed(&mut self, session: usize) {
        if self.running_steps.remove(&session) == Some(0) {
            self.idle_sessions -= 1;
        }
    }

    /// Sets the time of a worker's next event; a worker without one is idle.
    pub(super) fn set_next_event(&mut self, worker: usize, next: Option<Seconds>) {
        if self.is_busy.len() <= worker {
            self.is_busy.resize(worker + 1, false);
        }
        let before = std::mem::replace(&mut self.is_busy[worker], next.is_some());
        self.busy_workers = self.busy_workers + usize::from(next.is_some()) - usize::from(before);
    }

    /// Returns the busy share of the workers while sessions are idle, weighted by idle sessions; none if none ever was.
    pub(super) fn gap_utilization(&self, workers: f64) -> Option<f64> {
        (self.idle_seconds > 0.0).then(|| self.busy_idle_seconds / self.idle_seconds / workers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gap_utilization_counts_busy_workers_once_per_paused_session() {
        let mut gaps = UtilizationTracker::default();
        assert_eq!(gaps.gap_utilization(2.0), None);
        gaps.opened(1);
        gaps.step_arrived(1);
        gaps.set_next_event(1, Some(Seconds(4.0)));
        gaps.pass(Seconds(4.0));
        assert_eq!((gaps.gap_utilization(2.0), gaps.busy_seconds), (None, 4.0), "no session paused");
        gaps.step_finished(1);
        // One second with one idle session and one of two workers busy, then three with two idle sessions and none
        // busy.
        gaps.pass(Seconds(1.0));
        gaps.set_next_event(1, None);
        gaps.opened(2);
        gaps.pass(Seconds(3.0));
        assert_eq!(gaps.gap_utilization(2.0), Some(1.0 / 7.0 / 2.0));
        gaps.closed(1);
        gaps.closed(2);
        gaps.pass(Seconds(9.0));
        assert_eq!(
            (gaps.gap_utilization(2.0), gaps.busy_seconds),
            (Some(1.0 / 14.0), 5.0),
            "sessions that are over do not pause"
        );
    }

    #[test]
    fn session_pauses_when_its_last_running_step_ends() {
        let mut gaps = UtilizationTracker::default();
        gaps.step_arrived(7);
        gaps.step_finished(7);
        assert_eq!(gaps.idle_sessions, 0, "requests on their own have no session");
        gaps.opened(1);
        gaps.step_arrived(1);
        gaps.step_arrived(1);
        gaps.step_finished(1);
        assert_eq!(gaps.idle_sessions, 0);
        gaps.step_finished(1);
        assert_eq!(gaps.idle_sessions, 1);
    }
}
