//! Who only looks on: watchers that follow the changes from node to node, at their own pace, and a reader that names the
//! age it can live with.

use std::sync::Arc;
use std::time::Duration;

use consensus::{Change, Compacted, Watch};
use futures::channel::mpsc;
use futures::stream::Peekable;
use futures::{FutureExt, StreamExt};
use openraft::AsyncRuntime;

use crate::checks::watches::{self, Told};
use crate::client::Client;
use crate::node::Node;
use crate::people::People;
use crate::process;
use crate::rng::Rng;
use crate::runtime::Sim;
use crate::world::World;

pub(crate) const WATCHERS: u64 = 2;

/// How long a watcher hears nothing before it looks for another node, once all should be well.
const PATIENCE: Duration = Duration::from_secs(3);

/// Follows the changes over nodes that come and go, until all that was acknowledged at the end was told.
pub(crate) async fn watcher(world: Arc<World>, people: Arc<People>, n: u64) {
    let mut rng = Rng::stream(world.plan.seed ^ n << 32, "watcher");
    let mut watcher = Watcher { who: format!("watcher {n}"), world: world.clone(), told: None };
    loop {
        let last = people.is_stopping().then(|| world.book.last_acknowledged());
        if let (Some(last), Some(told)) = (last, watcher.told)
            && world.book.is_told(told, last)
        {
            return people.leave();
        }
        let (lasts, pause) = match last {
            Some(_) => (PATIENCE, 1),
            // Some read slower than changes come.
            None => (rng.millis(500, 20_000), if rng.chance(300) { 2_500 } else { 30 }),
        };
        match rng.pick(&world.up()).cloned() {
            Some(node) => watcher.follow(node, (rng.fork(), pause), lasts).await,
            None => Sim::sleep(Duration::from_millis(500)).await,
        }
    }
}

struct Watcher {
    who: String,
    world: Arc<World>,
    told: Option<Told>,
}

impl Watcher {
    /// Watches at one node for so long.
    async fn follow(&mut self, node: Arc<Node>, (rng, pause): (Rng, u64), lasts: Duration) {
        let told = self.told.unwrap_or_else(|| Told::before(node.view().applied() + 1));
        self.told = Some(told);
        self.world.book.count("watches begun");
        let watch = match node.shown.feed.watch(told.revision) {
            Ok(watch) => watch,
            Err(compacted) => return self.cut(&node, compacted),
        };
        let (teller, mut heard) = mpsc::unbounded();
        process::within(node.pid, || drop(Sim::spawn(tell(node.clone(), watch.peekable(), (rng, pause), teller))));
        let listen = async {
            while let Some(revision) = heard.next().await {
                match revision {
                    Ok(changes) => self.hear(&changes),
                    Err(compacted) => return self.cut(&node, compacted),
                }
            }
        };
        // A node that died says nothing any more.
        let _silent = Sim::timeout(lasts, listen).await;
    }

    fn hear(&mut self, changes: &[Change]) {
        if let Some(told) = &mut self.told {
            self.world.book.tells(&self.who, told, changes);
        }
    }

    /// Cut off: the records are read anew, and watched from there.
    fn cut(&mut self, node: &Node, compacted: Compacted) {
        let (told, applied) = (self.told.unwrap_or(Told::before(0)), node.view().applied());
        self.world.book.count("watches compacted");
        self.world.book.note(watches::check_cut(&self.who, told, compacted, applied));
        self.told = Some(Told::before(applied + 1));
    }
}

type Telling = mpsc::UnboundedSender<Result<Vec<Change>, Compacted>>;

/// Tells one listener, in the node's process, revision by revision, for as long as it listens.
async fn tell(node: Arc<Node>, mut watch: Peekable<Watch>, (mut rng, pause): (Rng, u64), teller: Telling) {
    loop {
        Sim::sleep(rng.millis(0, pause)).await;
        let revision = match watch.next().await {
            Some(Ok(first)) => Ok(whole(first, &mut watch)),
            Some(Err(compacted)) => Err(compacted),
            None => return,
        };
        if let Some(first) = revision.as_ref().ok().and_then(|changes| changes.first()) {
            let (who, applied) = (format!("who watches node {}", node.id), node.view().applied());
            node.world().book.note(watches::check_shown(&who, first.revision, applied));
        }
        if teller.unbounded_send(revision).is_err() {
            return;
        }
    }
}

/// The rest of a revision, which is there at once.
fn whole(first: Change, watch: &mut Peekable<Watch>) -> Vec<Change> {
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

/// Reads from nodes what is no older than it can live with, now and then several times in a row.
pub(crate) async fn reader(world: Arc<World>, people: Arc<People>) {
    let mut client = Client::new(&world, 200);
    while !people.is_stopping() {
        Sim::sleep(client.rng.millis(50, 1_500)).await;
        let Some(node) = client.rng.pick(&world.ids()).copied() else { continue };
        for _ in 0..client.rng.within(1, 4) {
            let bound = *client.rng.pick(&[1, 20, 200, 1_000, 5_000]).unwrap_or(&1);
            let is_answered = client.read_within(node, Duration::from_millis(bound)).await;
            world.book.count(if is_answered { "bounded reads" } else { "bounded reads refused" });
            if !is_answered {
                break;
            }
        }
    }
    people.leave();
}
