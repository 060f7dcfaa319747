//! The guard that ends a request whose client leaves.

use std::fmt::Debug;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use super::request_end::RequestEnd;
use crate::receipt::RequestOutcome;

/// A state of a request in which its client may leave.
pub(super) trait RequestState {
    /// Ends the request in this state; `None` where it was never planned.
    fn into_end(self, outcome: RequestOutcome) -> Option<RequestEnd>;
}

/// Records the ends of requests: all sinks together, behind a trait, so that a state need not know them.
pub(super) trait RequestEndRecorder: Debug + Send + Sync {
    /// Records the end of a request, once for each, however it ended.
    fn record(&self, end: RequestEnd);
}

/// Guard of a request's state, which makes sure that the request's end is recorded. Dropping it means that the client
/// left: it then records the state's end. A transition takes the state out, and nothing is recorded.
pub(super) struct EndGuard<S: RequestState> {
    state: Option<S>,
    recorder: Arc<dyn RequestEndRecorder>,
}

impl<S: RequestState> EndGuard<S> {
    /// Guards a state.
    pub(super) fn new(state: S, recorder: &Arc<dyn RequestEndRecorder>) -> Self {
        Self { state: Some(state), recorder: recorder.clone() }
    }

    /// Takes the state out.
    pub(super) fn take(mut self) -> S {
        self.state.take().expect("only this method and the ends take it, and each consumes the guard")
    }

    /// Ends the request in the state it is in.
    pub(super) fn end(mut self, outcome: RequestOutcome) {
        self.record_end(outcome);
    }

    /// Ends the request by a transition of its state.
    pub(super) fn end_with(self, end: impl FnOnce(S) -> RequestEnd) {
        let recorder = self.recorder.clone();
        recorder.record(end(self.take()));
    }

    fn record_end(&mut self, outcome: RequestOutcome) {
        if let Some(end) = self.state.take().and_then(|state| state.into_end(outcome)) {
            self.recorder.record(end);
        }
    }
}

impl<S: RequestState> Deref for EndGuard<S> {
    type Target = S;

    fn deref(&self) -> &S {
        self.state.as_ref().expect("a state is inside until the guard is consumed")
    }
}

impl<S: RequestState> DerefMut for EndGuard<S> {
    fn deref_mut(&mut self) -> &mut S {
        self.state.as_mut().expect("a state is inside until the guard is consumed")
    }
}

impl<S: RequestState> Drop for EndGuard<S> {
    fn drop(&mut self) {
        self.record_end(RequestOutcome::ClientDisconnected);
    }
}
