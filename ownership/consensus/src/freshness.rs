//! How fresh a read has to be, and how that is made sure.
//!
//! A fresh read asks the leader how far one must have applied, after a quorum has confirmed that it still leads. A
//! leader's lease is never trusted: it does not survive a restart.

use std::future::Future;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use derive_where::derive_where;
use openraft::async_runtime::instant::Instant;
use openraft::errors::{LinearizableReadError, RaftError};
use openraft::raft::ReadPolicy;
use openraft::storage::RaftStateMachine;
use openraft::{AsyncRuntime, Raft};

use crate::types::TypeConfig;

/// How fresh a view must be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Consistency {
    /// As this node last applied it. Never waits.
    Local,
    /// Holds everything that was acknowledged so long before the read began, wherever.
    Bounded(Duration),
    /// Holds everything that was acknowledged, wherever, before the read began.
    Linearizable,
}

/// Since when a node's view is known to hold everything that was acknowledged before.
#[derive(Debug)]
#[derive_where(Default)]
pub struct FreshnessClock<I>(Mutex<Option<I>>);

impl<I: Instant> FreshnessClock<I> {
    /// How old the view may be at most; none before it was ever confirmed.
    pub fn age(&self) -> Option<Duration> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).map(|at| at.elapsed())
    }

    /// Makes the view as fresh as asked. `catch_up` waits until the view shows all that was acknowledged before it was
    /// first polled.
    pub async fn ensure_fresh<E>(
        &self,
        consistency: Consistency,
        catch_up: impl Future<Output = Result<(), E>>,
    ) -> Result<(), E> {
        let is_met = match consistency {
            Consistency::Local => true,
            Consistency::Bounded(bound) => self.age().is_some_and(|age| age <= bound),
            Consistency::Linearizable => false,
        };
        if is_met {
            return Ok(());
        }
        // What is acknowledged while it catches up may be missing.
        let began = I::now();
        catch_up.await?;
        self.confirmed(began);
        Ok(())
    }

    fn confirmed(&self, at: I) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *known = (*known).max(Some(at));
    }
}

/// The index at which everything is applied that was acknowledged before this was asked: what this node as leader
/// vouches for, once a quorum has confirmed, in a round that began afterwards, that it still leads.
pub async fn read_index<R, M>(raft: &Raft<TypeConfig<R>, M>) -> Result<u64, ReadIndexError<R>>
where
    R: AsyncRuntime,
    M: RaftStateMachine<TypeConfig<R>>,
{
    let (read, _) = raft.get_read_log_id(ReadPolicy::ReadIndex).await?;
    Ok(read.index())
}

/// Why there is no read index: this node does not lead, or no quorum confirms that it does.
pub type ReadIndexError<R> = RaftError<TypeConfig<R>, LinearizableReadError<TypeConfig<R>>>;

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::time::Instant;

    use futures::FutureExt;

    use super::*;

    /// What a read said; it never has to wait here.
    fn read(freshness: &FreshnessClock<Instant>, consistency: Consistency, answer: Result<(), u8>) -> Result<bool, u8> {
        let mut asked = false;
        let catch_up = async {
            asked = true;
            answer
        };
        freshness.ensure_fresh(consistency, catch_up).now_or_never().unwrap()?;
        Ok(asked)
    }

    #[test]
    fn a_read_asks_the_quorum_only_when_the_view_is_too_old() {
        let (freshness, hour) = (FreshnessClock::default(), Duration::from_secs(3_600));
        assert_eq!(read(&freshness, Consistency::Local, Ok(())), Ok(false));
        assert_eq!(freshness.age(), None);
        assert_eq!(read(&freshness, Consistency::Bounded(hour), Err(7)), Err(7));
        assert_eq!(freshness.age(), None, "nothing was confirmed");
        assert_eq!(read(&freshness, Consistency::Bounded(hour), Ok(())), Ok(true));
        assert_eq!(read(&freshness, Consistency::Bounded(hour), Err(7)), Ok(false));
        assert_eq!(read(&freshness, Consistency::Bounded(Duration::ZERO), Ok(())), Ok(true));
        assert_eq!(read(&freshness, Consistency::Linearizable, Ok(())), Ok(true));
    }

    #[test]
    fn view_age_counts_from_the_start_of_the_confirming_read() {
        let freshness = FreshnessClock::<Instant>::default();
        let mut asked = None;
        let catch_up = async {
            let now = *asked.insert(Instant::now());
            while Instant::now() == now {}
            Ok::<_, Infallible>(())
        };
        freshness.ensure_fresh(Consistency::Linearizable, catch_up).now_or_never().unwrap().unwrap();
        assert!(*freshness.0.lock().unwrap() <= asked);
    }
}
