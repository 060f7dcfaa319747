//! Linearizability of a whole history: there must be an order of all operations, each between its request and its
//! reply, in which a single ledger would have given every reply. Bounded search by Wing and Gong with Lowe's
//! memoization.
//!
//! A write with an unknown outcome may take effect at any later time, or never.

use std::collections::HashSet;
use std::fmt::Debug;
use std::hash::Hash;

use super::violation::GuaranteeViolation;
use crate::history::RunInstant;

/// Maximum number of positions searched per session or register.
pub(super) const MAX_POSITIONS: usize = 400_000;

/// Result of a search.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum LinearizabilityVerdict {
    /// A valid order exists.
    Linearizable,
    /// No valid order exists.
    Broken(GuaranteeViolation),
    /// No order was found within the limit; nothing is proven.
    Undecided,
}

/// What is known of an operation's effect.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum OperationEffect {
    /// It had none: it has no place in the order.
    Nothing,
    /// It took effect between its request and its reply, and the reply tells the result.
    Answered,
    /// It may take effect once, at any time after its request, or never.
    Unknown,
    /// The same for a write that is fenced, so that the ledger itself refuses a second effect.
    UnknownFenced,
}

/// What a single ledger would do, one operation after the other.
pub(super) trait SequentialModel {
    /// An operation of a client.
    type Operation;
    /// The state that operations change.
    type State: Copy + Eq + Hash + Debug;

    /// Moments of the request and of the reply.
    fn interval(operation: &Self::Operation) -> (RunInstant, RunInstant);

    /// What is known of the operation's effect.
    fn effect(operation: &Self::Operation) -> OperationEffect;

    /// The operation in words, for violation messages.
    fn describe(operation: &Self::Operation) -> String;

    /// Whether two writes with unknown outcomes have the same effect wherever they take it.
    fn is_same_write(_first: &Self::Operation, _second: &Self::Operation) -> bool {
        false
    }

    /// Returns the state after an operation with this reply, or `None` if the ledger would not have given it. Nothing
    /// is known of the state before the first operation.
    fn state_after_answer(
        &self,
        state: Option<Self::State>,
        operation: &Self::Operation,
    ) -> Option<Option<Self::State>>;

    /// Returns the state after a write with an unknown outcome, assuming that it takes effect now; `None` if it would
    /// have no effect.
    fn state_after_unknown(&self, state: Option<Self::State>, operation: &Self::Operation) -> Option<Self::State>;
}

/// Position of a search: operations already in order, and the state after them.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct SearchPosition<S> {
    /// All answered operations before this index are in order.
    first: usize,
    /// Operations at or after it that are in order, too.
    done_ahead: Vec<usize>,
    /// Unfenced writes with unknown outcomes that are assumed to have taken effect.
    assumed_applied: Vec<usize>,
    state: Option<S>,
}

impl<S: Copy> SearchPosition<S> {
    fn is_in_order(&self, at: usize) -> bool {
        at < self.first || self.done_ahead.binary_search(&at).is_ok()
    }

    fn with_operation(&self, at: usize, state: Option<S>) -> SearchPosition<S> {
        let mut next = SearchPosition { state, ..self.clone() };
        if let Err(place) = next.done_ahead.binary_search(&at) {
            next.done_ahead.insert(place, at);
        }
        while next.done_ahead.first() == Some(&next.first) {
            next.done_ahead.remove(0);
            next.first += 1;
        }
        next
    }

    fn with_assumed(&self, at: usize, effect: OperationEffect, state: S) -> SearchPosition<S> {
        let mut next = SearchPosition { state: Some(state), ..self.clone() };
        // What cannot take effect twice needs no separate position.
        if effect != OperationEffect::UnknownFenced
            && let Err(place) = next.assumed_applied.binary_search(&at)
        {
            next.assumed_applied.insert(place, at);
        }
        next
    }
}

/// Searches for a valid order of the operations on `subject`, at most through `most` positions. `guarantee` names what
/// is violated if there is none.
pub(super) fn search<M: SequentialModel>(
    model: &M,
    operations: &[&M::Operation],
    (subject, guarantee): (&str, &'static str),
    most: usize,
) -> LinearizabilityVerdict {
    let with_effect = |is_wanted: fn(OperationEffect) -> bool| {
        operations.iter().copied().filter(move |operation| is_wanted(M::effect(operation)))
    };
    let mut known: Vec<&M::Operation> = with_effect(|effect| effect == OperationEffect::Answered).collect();
    known.sort_by_key(|operation| M::interval(operation).0);
    let unknown: Vec<&M::Operation> =
        with_effect(|effect| matches!(effect, OperationEffect::Unknown | OperationEffect::UnknownFenced)).collect();
    let begin = SearchPosition { first: 0, done_ahead: Vec::new(), assumed_applied: Vec::new(), state: None };
    let (mut open, mut seen) = (vec![begin.clone()], HashSet::new());
    let mut furthest = begin;
    while let Some(position) = open.pop() {
        if position.first == known.len() {
            return LinearizabilityVerdict::Linearizable;
        }
        if !seen.insert(position.clone()) {
            continue;
        }
        if seen.len() > most {
            return LinearizabilityVerdict::Undecided;
        }
        if position.first + position.done_ahead.len() > furthest.first + furthest.done_ahead.len() {
            furthest = position.clone();
        }
        let (candidates, until) = candidates::<M>(&known, &position);
        // The last candidate is tried first: answered operations before those that may have happened.
        let is_open = |at: usize, write: &M::Operation| {
            M::interval(write).0 <= until && position.assumed_applied.binary_search(&at).is_err()
        };
        // Of equal writes the first will do: once requested, each stays available.
        let is_repeated = |at: usize, write: &M::Operation| {
            unknown[..at]
                .iter()
                .enumerate()
                .any(|(before, first)| M::is_same_write(first, write) && is_open(before, first))
        };
        let writes = unknown.iter().enumerate().filter(|(at, write)| is_open(*at, write) && !is_repeated(*at, write));
        let happened = writes.filter_map(|(at, write)| {
            Some(position.with_assumed(at, M::effect(write), model.state_after_unknown(position.state, write)?))
        });
        open.extend(happened);
        let answered = candidates.into_iter().rev();
        open.extend(
            answered.filter_map(|at| {
                Some(position.with_operation(at, model.state_after_answer(position.state, known[at])?))
            }),
        );
    }
    let stuck = known.get(furthest.first).map_or_else(String::new, |operation| M::describe(operation));
    let detail = format!("{subject}: no order explains that {stuck}, after {:?}", furthest.state);
    LinearizabilityVerdict::Broken(GuaranteeViolation { guarantee, detail })
}

/// Returns the operations that may come next: those requested before the first of the remaining ones was answered.
fn candidates<M: SequentialModel>(
    known: &[&M::Operation],
    position: &SearchPosition<M::State>,
) -> (Vec<usize>, RunInstant) {
    let mut until = RunInstant(u64::MAX);
    let mut found = Vec::new();
    for (at, operation) in known.iter().enumerate().skip(position.first) {
        let (invoked, completed) = M::interval(operation);
        if invoked > until {
            break;
        }
        if !position.is_in_order(at) {
            until = until.min(completed);
            found.push(at);
        }
    }
    found.retain(|at| M::interval(known[*at]).0 <= until);
    (found, until)
}
