//! Read-only participants: watchers that follow the changes from node to node at their own pace, and a reader with
//! bounded staleness.

use std::sync::Arc;
use std::time::Duration;

use consensus::{ChangeEvent, ChangeStream, CompactedRevision};
use futures::channel::mpsc;
use futures::stream::Peekable;
use futures::{FutureExt, StreamExt};
use openraft::AsyncRuntime;

use crate::checks::watches::{self, WatchProgress};
use crate::client::SimClient;
use crate::process;
use crate::rng::Rng;
use crate::runtime::SimulatedRuntime;
use crate::sim_node::SimNode;
use crate::workload::LockHistories;
use crate::world::SimWorld;

pub(crate) const WATCHERS: u64 = 2;

/// Silence after which a watcher switches to another node, once everything should be well.
const WATCH_TIMEOUT: Duration = Duration::from_secs(3);

/// Follows the changes across nodes, until everything that was acknowledged at the end was received.
pub(crate) async fn run_watcher(world: Arc<SimWorld>, histories: Arc<LockHistories>, n: u64) {
    let mut rng = Rng::stream(world.plan.seed ^ n << 32, "watcher");
    let mut watcher = FeedWatcher { name: format!("watcher {n}"), world: world.clone(), progress: None };
    loop {
        let last = histories.is_stopping().then(|| world.recorder.last_acknowledged());
        if let (Some(last), Some(progress)) = (last, watcher.progress)
            && world.recorder.has_received_all(progress, last)
        {
            return histories.finish_client();
        }
        let (lasts, pause) = match last {
            Some(_) => (WATCH_TIMEOUT, 1),
            // Some watchers read slower than changes come.
            None => (rng.millis(500, 20_000), if rng.chance(300) { 2_500 } else { 30 }),
        };
        match rng.pick(&world.running_nodes()).cloned() {
            Some(node) => watcher.follow(node, (rng.fork(), pause), lasts).await,
            None => SimulatedRuntime::sleep(Duration::from_millis(500)).await,
        }
    }
}

struct FeedWatcher {
    name: String,
    world: Arc<SimWorld>,
    progress: Option<WatchProgress>,
}

impl FeedWatcher {
    /// Watches at one node for the given time.
    async fn follow(&mut self, node: Arc<SimNode>, (rng, pause): (Rng, u64), lasts: Duration) {
        let progress = self.progress.unwrap_or_else(|| WatchProgress::starting_at(node.view().applied() + 1));
        self.progress = Some(progress);
        self.world.recorder.count("watches begun");
        let watch = match node.read_state.feed.watch(progress.revision) {
            Ok(watch) => watch,
            Err(compacted) => return self.on_compacted(&node, compacted),
        };
        let (sender, mut revisions) = mpsc::unbounded();
        process::run_in(node.pid, || {
            drop(SimulatedRuntime::spawn(deliver_changes(node.clone(), watch.peekable(), (rng, pause), sender)))
        });
        let listen = async {
            while let Some(revision) = revisions.next().await {
                match revision {
                    Ok(changes) => self.record_changes(&changes),
                    Err(compacted) => return self.on_compacted(&node, compacted),
                }
            }
        };
        // A dead node sends nothing more.
        let _silent = SimulatedRuntime::timeout(lasts, listen).await;
    }

    fn record_changes(&mut self, changes: &[ChangeEvent]) {
        if let Some(progress) = &mut self.progress {
            self.world.recorder.on_changes_delivered(&self.name, progress, changes);
        }
    }

    /// Handles a compacted watch: reads the records again and watches from there.
    fn on_compacted(&mut self, node: &SimNode, compacted: CompactedRevision) {
        let (progress, applied) = (self.progress.unwrap_or(WatchProgress::starting_at(0)), node.view().applied());
        self.world.recorder.count("watches compacted");
        self.world.recorder.record_result(watches::check_compaction(&self.name, progress, compacted, applied));
        self.progress = Some(WatchProgress::starting_at(applied + 1));
    }
}

type ChangeSender = mpsc::UnboundedSender<Result<Vec<ChangeEvent>, CompactedRevision>>;

/// Delivers changes to one watcher, in the node's process, revision by revision, for as long as it listens.
async fn deliver_changes(
    node: Arc<SimNode>,
    mut watch: Peekable<ChangeStream>,
    (mut rng, pause): (Rng, u64),
    sender: ChangeSender,
) {
    loop {
        SimulatedRuntime::sleep(rng.millis(0, pause)).await;
        let revision = match watch.next().await {
            Some(Ok(first)) => Ok(rest_of_revision(first, &mut watch)),
            Some(Err(compacted)) => Err(compacted),
            None => return,
        };
        if let Some(first) = revision.as_ref().ok().and_then(|changes| changes.first()) {
            let (watcher, applied) = (format!("who watches node {}", node.id), node.view().applied());
            node.world().recorder.record_result(watches::check_shown(&watcher, first.revision, applied));
        }
        if sender.unbounded_send(revision).is_err() {
            return;
        }
    }
}

/// Returns the rest of a revision, which is available at once.
fn rest_of_revision(first: ChangeEvent, watch: &mut Peekable<ChangeStream>) -> Vec<ChangeEvent> {
    let revision = first.revision;
    let mut changes = vec![first];
    let mut rest = std::pin::Pin::new(watch);
    while let Some(Some(Ok(next))) =
        rest.as_mut().next_if(|it| it.as_ref().is_ok_and(|it| it.revision == revision)).now_or_never()
    {
        changes.push(next);
    }
    changes
}

/// Performs reads with bounded staleness, sometimes several in a row.
pub(crate) async fn run_reader(world: Arc<SimWorld>, histories: Arc<LockHistories>) {
    let mut client = SimClient::new(&world, 200);
    while !histories.is_stopping() {
        SimulatedRuntime::sleep(client.rng.millis(50, 1_500)).await;
        let Some(node) = client.rng.pick(&world.ids()).copied() else { continue };
        for _ in 0..client.rng.within(1, 4) {
            let bound = *client.rng.pick(&[1, 20, 200, 1_000, 5_000]).unwrap_or(&1);
            let is_answered = client.read_bounded(node, Duration::from_millis(bound)).await;
            world.recorder.count(if is_answered { "bounded reads" } else { "bounded reads refused" });
            if !is_answered {
                break;
            }
        }
    }
    histories.finish_client();
}
