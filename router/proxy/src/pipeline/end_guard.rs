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

/// What takes the end of each request.
pub(super) trait RecordEnd: Debug + Send + Sync {
    /// Takes the end of a request, once for each, however it ended.
    fn record(&self, end: RequestEnd);
}

/// A request's state. Dropping it means that the client left: the sinks then take the state's end. A transition takes
/// the state out.
pub(super) struct EndGuard<S: RequestState> {
    state: Option<S>,
    ends: Arc<dyn RecordEnd>,
}

impl<S: RequestState> EndGuard<S> {
    /// Guards a state.
    pub(super) fn new(state: S, ends: &Arc<dyn RecordEnd>) -> Self {
        Self { state: Some(state), ends: ends.clone() }
    }

    /// Takes the state out.
    pub(super) fn take(mut self) -> S {
        self.state.take().expect("only this method and the ends take it, and each consumes the guard")
    }

    /// Ends the request in the state it is in.
    pub(super) fn end(mut self, outcome: RequestOutcome) {
        self.hand_over(outcome);
    }

    /// Ends the request by a transition of its state.
    pub(super) fn end_with(self, end: impl FnOnce(S) -> RequestEnd) {
        let ends = self.ends.clone();
        ends.record(end(self.take()));
    }

    fn hand_over(&mut self, outcome: RequestOutcome) {
        if let Some(end) = self.state.take().and_then(|state| state.into_end(outcome)) {
            self.ends.record(end);
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
        self.hand_over(RequestOutcome::ClientDisconnected);
    }
}
