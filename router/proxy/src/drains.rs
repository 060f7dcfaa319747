//! Drains: applies the drain flags in the ledger to this router's fleet, whichever router the operator used.

use std::sync::{Arc, Weak};
use std::time::Duration;

use futures::StreamExt as _;
use ownership::ledger::{DrainFlag, RecordKey};
use ownership::{ChangeEvent, OwnershipDirectory};
use vocabulary::{WorkerHealth, WorkerId};
use workers_shim::fleet::Fleet;

/// Delay before following the ledger's changes again, where the watch could not start at the view.
const RESYNC_DELAY: Duration = Duration::from_millis(100);

/// Applies drain flags as soon as the ledger's view shows them.
pub async fn follow(directory: Arc<OwnershipDirectory>, fleet: Weak<Fleet>) {
    loop {
        let view = directory.view();
        let Some(all) = fleet.upgrade() else { return };
        view.workers().for_each(|worker| apply(&directory, &all, worker.id));
        drop(all);
        let Ok(mut changes) = directory.watch(view.applied() + 1) else {
            tokio::time::sleep(RESYNC_DELAY).await;
            continue;
        };
        drop(view);
        loop {
            match changes.next().await {
                Some(Ok(ChangeEvent { key: RecordKey::Worker(worker), .. })) => {
                    let Some(fleet) = fleet.upgrade() else { return };
                    apply(&directory, &fleet, worker);
                }
                Some(Ok(_)) => {}
                // The watch fell behind: start again from the view.
                Some(Err(_)) => break,
                None => return,
            }
        }
    }
}

/// Sets the drain state of a worker to the ledger's current flag.
pub fn apply(directory: &OwnershipDirectory, fleet: &Fleet, worker: WorkerId) {
    let drain_flag = || directory.view().worker(worker).map(|record| record.draining);
    converge(drain_flag, |wanted| fleet.set_draining(worker, wanted));
}

/// Applies the flag and reads it again: a concurrent caller may have applied a newer flag, which this one has
/// overwritten.
fn converge(said: impl Fn() -> Option<DrainFlag>, mut set: impl FnMut(WorkerHealth)) {
    let mut newest = said();
    while let Some(draining) = newest {
        set(match draining {
            DrainFlag::Yes => WorkerHealth::Draining,
            DrainFlag::No => WorkerHealth::Ready,
        });
        newest = said().filter(|now| *now != draining);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use super::*;

    #[test]
    fn a_stale_drain_command_is_overridden_by_the_newest() {
        let (said, done) = (Cell::new(Some(DrainFlag::Yes)), RefCell::new(Vec::new()));
        let set = |wanted| {
            // Between this caller's read and its write, the flag changed, and another caller has applied the new one.
            if done.borrow().is_empty() {
                said.set(Some(DrainFlag::No));
                done.borrow_mut().push(WorkerHealth::Ready);
            }
            done.borrow_mut().push(wanted);
        };
        converge(|| said.get(), set);
        assert_eq!(done.take(), [WorkerHealth::Ready, WorkerHealth::Draining, WorkerHealth::Ready]);
        converge(|| None, |wanted| done.borrow_mut().push(wanted));
        assert!(done.take().is_empty(), "the ledger knows no such worker");
    }
}
