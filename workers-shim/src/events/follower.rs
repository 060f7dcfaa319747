//! Follows one worker's events, life after life.
//!
//! The live socket is read as fast as its messages are applied and no faster: what piles up does so in the socket and
//! at the engine, which drops at its own mark; a drop is a gap, and a gap is replayed. So there is no queue here.

mod exchange;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, SystemTime};

use futures::StreamExt as _;
use residency::{DecodeError, Event, Feed, Limits, Met, SourceRules, Stream, Verdict, decode};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{interval_at, sleep, timeout};
use vocabulary::{DpRank, Incarnation, Knowledge};
use zeromq::{Socket, SocketEvent, SocketRecv, SubSocket};

use super::discovery::EventSource;
use super::imprints::{Asked, Imprints};
use super::log::EventLog;
use super::replay::{Message, replay};
use super::shared::SharedIndex;
use crate::fleet::member::Member;
use crate::fleet::probe::{get, life_of};
use crate::fleet::{EventsAt, RulesOf};

/// The longest wait for a connection.
const PATIENCE: Duration = Duration::from_secs(2);
/// Between two tries to reach a publisher.
const RETRY: Duration = Duration::from_millis(200);
/// A fresh subscription may miss what is said before it takes effect: so long after it, what was missed is asked for.
const FIRST_CHECK: Duration = Duration::from_millis(300);
/// Messages can be lost without a later one that shows the gap, so now and then it is asked for.
const CHECK: Duration = Duration::from_secs(5);

/// What all followers of a fleet share.
#[derive(Clone)]
pub(crate) struct Following {
    /// For questions to the workers.
    pub(crate) client: reqwest::Client,
    /// Where events go.
    pub(crate) index: SharedIndex,
    /// How they are read.
    pub(crate) rules: RulesOf,
    /// The other routers, where there are any.
    pub(crate) imprints: Option<Arc<dyn Imprints>>,
    /// Between two looks for a worker's sources when it had none.
    pub(crate) look_again: Duration,
}

/// Follows a worker until aborted.
pub(crate) async fn follow(member: Arc<Member>, with: Following) {
    let mut life = member.life();
    // The life without events of which something may have been guessed.
    let mut guessed = None;
    loop {
        let Some(incarnation) = *life.borrow_and_update() else {
            // Without an identity whoever answers next may be another one.
            guessed = guessed.filter(|life| *life != Incarnation(0));
            if life.changed().await.is_err() {
                return;
            }
            continue;
        };
        let worker = Worker { member: member.clone(), with: with.clone(), incarnation };
        if guessed == Some(incarnation) {
            with.index.age(member.id);
        } else {
            with.index.guessed(member.id);
        }
        let (sources, rules) = (worker.sources().await, worker.rules());
        guessed = match rules.filter(|_| !sources.is_empty()) {
            Some(rules) => {
                worker.observe(sources, rules, &life).await;
                None
            }
            None => timeout(with.look_again, ended(life.clone(), incarnation)).await.is_err().then_some(incarnation),
        };
    }
}

/// Waits for the end of a life. A worker that is only unreachable may still be the same; one without an identity is
/// never the same again.
async fn ended(mut life: watch::Receiver<Option<Incarnation>>, incarnation: Incarnation) {
    let over = |now: &Option<Incarnation>| now.map_or(incarnation == Incarnation(0), |now| now != incarnation);
    // The sender lives as long as the worker does.
    let _ = life.wait_for(over).await;
}

/// One life of a worker.
#[derive(Clone)]
struct Worker {
    member: Arc<Member>,
    with: Following,
    incarnation: Incarnation,
}

impl Worker {
    async fn sources(&self) -> Vec<EventSource> {
        if let Some(configured) = EventSource::configured(&self.member.spec.events) {
            return vec![configured];
        }
        match (&self.member.spec.events, get(&self.with.client, &self.member, "/kv_event_sources").await) {
            (EventsAt::Discovered, Ok(text)) => EventSource::read_all(&text, &self.member.spec.endpoint),
            _ => Vec::new(),
        }
    }

    fn rules(&self) -> Option<SourceRules> {
        self.member.seen().models.iter().find_map(|model| (self.with.rules)(model))
    }

    /// Follows all ranks until this life ends.
    async fn observe(
        &self,
        sources: Vec<EventSource>,
        rules: SourceRules,
        life: &watch::Receiver<Option<Incarnation>>,
    ) {
        self.with.index.observed(self.member.id);
        let mut ranks = JoinSet::new();
        for source in sources {
            let feed = Feed::new(self.member.id, source.rank, rules.clone());
            let (worker, stream, told) = (self.clone(), Stream::new(), (0, Knowledge::Degraded));
            let asked = self.member.exports.open(source.rank);
            let rank = Rank { worker, source, stream, feed, told, asked };
            ranks.spawn(rank.run(life.clone()));
        }
        // Ranks of one engine have one block size: where one cannot go on, the others find the same as they speak.
        let mut usable = true;
        while let Some(end) = ranks.join_next().await {
            usable &= !matches!(end, Ok(End::Unusable));
        }
        self.member.changed();
        if !usable {
            tracing::warn!(worker = %self.member.spec.endpoint, "its blocks do not fit the chain's; events are ignored");
            self.with.index.guessed(self.member.id);
            ended(life.clone(), self.incarnation).await;
        }
    }
}

/// Why a rank is no longer followed, or a connection no longer read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum End {
    /// Another process is there now.
    Restarted,
    /// The connection is gone.
    Lost,
    /// Its blocks can never be placed.
    Unusable,
}

/// One rank of one life.
struct Rank {
    worker: Worker,
    source: EventSource,
    stream: Stream,
    feed: Feed,
    /// What was last said of it: engine blocks, and how they are known.
    told: (u64, Knowledge),
    /// Other routers that want an imprint.
    asked: mpsc::Receiver<Asked>,
}

impl Rank {
    async fn run(mut self, life: watch::Receiver<Option<Incarnation>>) -> End {
        let incarnation = self.worker.incarnation;
        self.stream.meet(incarnation);
        self.settle();
        let end = loop {
            let over = tokio::select! {
                () = ended(life.clone(), incarnation) => Some(End::Restarted),
                end = self.session() => Some(end).filter(|end| *end != End::Lost),
            };
            if let Some(end) = over {
                break end;
            }
            sleep(RETRY).await;
        };
        self.feed.leave();
        self.settle();
        if end == End::Restarted {
            // The prober will find the new life; a worker that it has not found yet must not be followed meanwhile.
            ended(life, incarnation).await;
        }
        end
    }

    /// One connection to the publisher, from its start to its end.
    async fn session(&mut self) -> End {
        let mut socket = SubSocket::new();
        let mut monitor = socket.monitor();
        let connected = async {
            socket.subscribe("").await?;
            socket.connect(&self.source.live).await
        };
        if !matches!(timeout(PATIENCE, connected).await, Ok(Ok(()))) {
            return End::Lost;
        }
        if let Err(end) = self.learn().await {
            return end;
        }
        let mut check = interval_at(tokio::time::Instant::now() + FIRST_CHECK, CHECK);
        loop {
            let step = tokio::select! {
                message = socket.recv() => match message {
                    Ok(message) => self.live(Message::of(message)).await,
                    Err(_) => Err(End::Lost),
                },
                event = monitor.next() => match event {
                    Some(SocketEvent::Disconnected(_)) | None => Err(End::Lost),
                    Some(_) => Ok(()),
                },
                _ = check.tick() => self.learn().await,
                Some(asked) = self.asked.recv() => {
                    self.export(asked).await;
                    Ok(())
                }
            };
            if let Err(end) = step {
                return end;
            }
        }
    }

    /// Gets all that can be had: from another router where not all is known here, and what was said since from the engine.
    async fn learn(&mut self) -> Result<(), End> {
        self.adopt().await;
        self.catch_up().await
    }

    /// A message of the live stream.
    async fn live(&mut self, message: Option<Message>) -> Result<(), End> {
        let log = &self.worker.member.events;
        let Some(message) = message else {
            EventLog::count(&log.undecodable);
            self.stream.spoiled();
            return self.tell();
        };
        match self.stream.live(message.sequence) {
            Verdict::Seen => Ok(()),
            Verdict::Apply => self.apply(&message),
            Verdict::Restarted => {
                EventLog::count(&log.restarts);
                self.stream.restart();
                self.feed.reset();
                self.settle();
                Err(End::Lost)
            }
            Verdict::Replay { .. } => {
                EventLog::count(&log.gaps);
                self.catch_up().await?;
                match self.stream.after_replay(message.sequence) {
                    Verdict::Apply => self.apply(&message),
                    _ => Ok(()),
                }
            }
        }
    }

    /// Makes sure that the same process speaks, then asks for all that is missing.
    async fn catch_up(&mut self) -> Result<(), End> {
        let log = &self.worker.member.events;
        if let Some(process) = life_of(&self.worker.with.client, &self.worker.member).await
            && self.stream.meet(process) == Met::Another
        {
            EventLog::count(&log.restarts);
            return Err(End::Restarted);
        }
        let Some(endpoint) = self.source.replay.clone() else { return self.tell() };
        EventLog::count(&log.replays);
        let start = self.stream.next();
        let mut outcome = Ok(());
        let replayed = replay(&endpoint, start, |message| {
            if outcome.is_ok() && self.stream.replayed(message.sequence) == Verdict::Apply {
                outcome = self.apply(&message);
            }
        });
        match replayed.await {
            Ok(()) => self.stream.replay_ended(),
            Err(error) => tracing::debug!(worker = %self.worker.member.spec.endpoint, %error, "replay"),
        }
        outcome?;
        self.tell()
    }

    /// Applies a message whose turn has come.
    fn apply(&mut self, message: &Message) -> Result<(), End> {
        let log = &self.worker.member.events;
        match decode(&message.payload, &Limits::default()) {
            Err(error) => self.undecodable(error),
            // One socket can carry several ranks; each follower listens to its own.
            Ok(batch) if batch.rank.is_some_and(|rank| rank != self.source.rank && rank != DpRank(0)) => {}
            Ok(batch) => {
                let before = self.feed.counts();
                if batch.events.contains(&Event::Cleared) {
                    self.stream.cleared();
                }
                self.feed.take_all(&batch.events);
                let after = self.feed.counts();
                let unplaced = (after.orphans + after.unknown_removals) - (before.orphans + before.unknown_removals);
                log.unplaced.fetch_add(unplaced, Relaxed);
                log.events.fetch_add(batch.events.len() as u64, Relaxed);
                EventLog::count(&log.batches);
                log.lag.store(lag(batch.timestamp), Relaxed);
                if after.over_limit > before.over_limit {
                    self.stream.spoiled();
                }
                if after.indivisible > before.indivisible {
                    return Err(End::Unusable);
                }
            }
        }
        self.tell()
    }

    fn undecodable(&mut self, error: DecodeError) {
        tracing::warn!(worker = %self.worker.member.spec.endpoint, %error, "an event message cannot be read");
        EventLog::count(&self.worker.member.events.undecodable);
        self.stream.spoiled();
    }

    /// Brings the index up to date, and says how far it can be believed.
    fn tell(&mut self) -> Result<(), End> {
        let knowledge = self.stream.knowledge();
        let member = self.worker.member.clone();
        let before = std::mem::replace(&mut self.told.1, knowledge);
        if before != knowledge {
            self.feed.know(knowledge);
        }
        self.settle();
        if before != knowledge {
            if knowledge == Knowledge::Degraded {
                tracing::warn!(worker = %member.spec.endpoint, "events were lost");
            }
            member.changed();
        }
        Ok(())
    }

    fn settle(&mut self) {
        let worker = &self.worker;
        let now = self.feed.blocks() as u64;
        let before = std::mem::replace(&mut self.told.0, now);
        // The worker's blocks are the sum over its ranks; the sum wraps where one of them shrinks.
        worker.member.events.blocks.fetch_add(now.wrapping_sub(before), Relaxed);
        if let Err(error) = worker.with.index.settle(&mut self.feed) {
            tracing::error!(worker = %worker.member.spec.endpoint, %error, "residency");
        }
    }
}

/// Microseconds from an engine's clock to ours; 0 where theirs is ahead.
fn lag(timestamp: f64) -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    ((now.as_secs_f64() - timestamp) * 1e6).max(0.0) as u64
}
