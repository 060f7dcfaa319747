//! What operators say of workers, as the ledger has it: obeyed here whichever router they said it to.

use std::sync::{Arc, Weak};
use std::time::Duration;

use futures::StreamExt as _;
use ownership::ledger::{DrainFlag, RecordKey};
use ownership::{ChangeEvent, Directory};
use vocabulary::{WorkerHealth, WorkerId};
use workers_shim::fleet::Fleet;

/// Between two attempts to follow the ledger's changes, where they outran the view that was begun from.
const RESYNC_DELAY: Duration = Duration::from_millis(100);

/// Obeys what operators say of workers as soon as the ledger shows it here.
pub(crate) async fn follow(directory: Arc<Directory>, fleet: Weak<Fleet>) {
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
                // Too slow for them: once more from the view.
                Some(Err(_)) => break,
                None => return,
            }
        }
    }
}

/// Takes a worker out of service, or back into it, as the ledger says by now.
pub(crate) fn apply(directory: &Directory, fleet: &Fleet, worker: WorkerId) {
    let said = || directory.view().worker(worker).map(|record| record.draining);
    converge(said, |wanted| fleet.set_draining(worker, wanted));
}

/// Sets what is said, and looks again: somebody else may have set meanwhile what is newer, and this has overruled it.
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
            // Between its look and this the ledger was told otherwise, and whoever heard of that has obeyed.
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
