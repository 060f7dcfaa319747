//! One rank of one life of a worker: its connection, what is said there, and how far that can be believed.

use std::time::Duration;

use residency::{Feed, Gap, Hearing, Met, SourceRules, Stream, Verdict, turned_over};
use tokio::sync::{mpsc, watch};
use tokio::time::{interval_at, sleep};
use vocabulary::{Knowledge, Tokens};

use super::connection::{Loss, listen, unanswered};
use super::{Worker, ended, misfit};
use crate::events::discovery::EventSource;
use crate::events::imprints::Asked;
use crate::events::replay::{Message, replay};
use crate::events::sources::Doubt;
use crate::fleet::probe::life_of;
use crate::zmtp::Connection;

/// Between two tries to reach a publisher.
const RETRY: Duration = Duration::from_millis(200);
/// A fresh subscription may miss what is said before it takes effect: so long after it, what was missed is asked for.
const FIRST_CHECK: Duration = Duration::from_millis(300);
/// Messages can be lost without a later one that shows the gap, so now and then it is asked for.
const CHECK: Duration = Duration::from_secs(5);
/// So many replays in a row; the next look goes on from there.
const MOST_REPLAYS: usize = 64;

/// Why a rank is no longer followed, or a connection no longer read.
#[derive(Debug)]
pub(super) enum End {
    /// Another process is there now.
    Restarted,
    /// The connection is gone.
    Lost(Loss),
    /// Its blocks of so many tokens can never be placed.
    Misfit(Tokens),
}

struct Told {
    blocks: u64,
    knowledge: Knowledge,
    /// Whether the log says that it is not heard.
    is_unheard: bool,
    /// Whether the log says that events are lost.
    is_holed: bool,
}

pub(super) struct Rank {
    pub(super) worker: Worker,
    pub(super) source: EventSource,
    pub(super) stream: Stream,
    pub(super) feed: Feed,
    rules: SourceRules,
    told: Told,
    /// Whether blocks were told that lie elsewhere than where the engine computes: nobody knows how many those can be.
    pub(super) is_tiered: bool,
    /// Other routers that want an imprint.
    asked: mpsc::Receiver<Asked>,
}

impl Rank {
    pub(super) fn new(worker: Worker, source: EventSource, rules: SourceRules) -> Self {
        let feed = Feed::new(worker.member.id, source.rank, rules.clone());
        let mut stream = Stream::new();
        stream.expect(worker.incarnation);
        let asked = worker.member.exports.open(source.rank);
        let told = Told { blocks: 0, knowledge: Knowledge::Degraded, is_unheard: false, is_holed: false };
        Self { worker, source, stream, feed, rules, told, is_tiered: false, asked }
    }

    /// Follows it until its life ends, or its blocks or another rank's turn out not to fit.
    pub(super) async fn run(mut self, misfit: &mut watch::Receiver<Option<Tokens>>) -> End {
        let (member, incarnation) = (self.worker.member.clone(), self.worker.incarnation);
        self.settle();
        let end = loop {
            let end = tokio::select! {
                () = ended(&member, incarnation) => End::Restarted,
                Some(block) = told(misfit) => End::Misfit(block),
                end = self.session() => end,
            };
            self.unheard(&end);
            if !matches!(end, End::Lost(_)) {
                break end;
            }
            sleep(RETRY).await;
        };
        if let End::Restarted = end {
            // The prober will find the new life; a worker that it has not found yet must not be followed meanwhile.
            ended(&member, incarnation).await;
        }
        self.feed.leave();
        self.settle();
        end
    }

    /// One connection to the publisher, from its start to its end.
    async fn session(&mut self) -> End {
        let endpoint = self.source.live.clone();
        let connection = match listen(&endpoint).await {
            Ok(connection) => connection,
            Err(loss) => return End::Lost(loss),
        };
        tokio::select! {
            end = self.hear(connection) => end,
            () = unanswered(&endpoint) => End::Lost(Loss::Unanswered),
        }
    }

    /// Reads a connection to its end. May be dropped at any wait: what a message means is applied between two of them.
    async fn hear(&mut self, mut connection: Connection) -> End {
        self.heard();
        if let Err(end) = self.learn().await {
            return end;
        }
        let mut check = interval_at(tokio::time::Instant::now() + FIRST_CHECK, CHECK);
        loop {
            let step = tokio::select! {
                message = connection.recv() => match message {
                    Ok(message) => self.live(Message::of(message)).await,
                    Err(error) => Err(End::Lost(error.into())),
                },
                _ = check.tick() => self.look().await,
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

    /// The connection stands.
    fn heard(&mut self) {
        if std::mem::take(&mut self.told.is_unheard) {
            let (worker, source) = (&self.worker.member.spec.endpoint, &self.source.live);
            tracing::info!(%worker, %source, rank = self.source.rank.0, "its KV events are heard again");
        }
        self.stand();
    }

    /// The connection is gone, or never was: what is known may be old from now on.
    fn unheard(&mut self, end: &End) {
        match end {
            End::Lost(loss) => {
                if !std::mem::replace(&mut self.told.is_unheard, true) {
                    let (worker, source) = (&self.worker.member.spec.endpoint, &self.source.live);
                    tracing::warn!(%worker, %source, rank = self.source.rank.0, why = %loss,
                        "its KV events are not heard; what it holds is known only as of before, until they are again");
                }
                self.stream.lose();
            }
            End::Restarted | End::Misfit(_) => self.start_over(),
        }
        let doubt = match end {
            End::Lost(_) => Doubt::Unconnected { live: self.source.live.clone() },
            End::Restarted => Doubt::Replaced,
            End::Misfit(block) => misfit(&self.rules, *block),
        };
        self.worker.member.events.sources.doubt_of(self.source.rank, Some(doubt));
        self.tell_knowledge();
    }

    /// Nothing is known any more; that is said before the blocks are forgotten, or nothing would be known exactly for a moment.
    fn start_over(&mut self) {
        self.stream.restart();
        self.tell_knowledge();
        self.feed.reset();
        self.settle();
    }

    /// Gets all that can be had: from another router where not all is known here, and what was said since from the engine.
    async fn learn(&mut self) -> Result<(), End> {
        self.adopt().await;
        self.catch_up().await
    }

    /// The same, while the connection should bring it.
    async fn look(&mut self) -> Result<(), End> {
        let from = self.stream.next();
        self.learn().await?;
        match self.stream.looked(from) {
            Hearing::Fine => Ok(()),
            Hearing::Deaf => Err(End::Lost(Loss::Deaf)),
        }
    }

    async fn live(&mut self, message: Option<Message>) -> Result<(), End> {
        let log = &self.worker.member.events;
        let Some(message) = message else {
            log.counts.lock().undecodable += 1;
            self.stream.spoiled();
            self.tell();
            return Ok(());
        };
        match self.stream.live(message.sequence) {
            Verdict::Seen => Ok(()),
            Verdict::Apply => self.apply(&message),
            Verdict::Restarted => {
                log.counts.lock().restarts += 1;
                self.start_over();
                Err(End::Lost(Loss::Backwards))
            }
            Verdict::Replay { .. } => {
                log.counts.lock().gaps += 1;
                self.catch_up().await?;
                match self.stream.after_replay(message.sequence) {
                    Verdict::Apply => self.apply(&message),
                    _ => Ok(()),
                }
            }
        }
    }

    /// Who is there now, if it tells.
    async fn meet(&mut self) -> Result<Met, End> {
        let process = life_of(&self.worker.with.client, &self.worker.member).await;
        let met = self.stream.meet(process);
        if met == Met::Another {
            self.worker.member.events.counts.lock().restarts += 1;
            return Err(End::Restarted);
        }
        Ok(met)
    }

    /// Makes sure that the same process speaks, asks for all that is missing, and makes sure again: between two looks another
    /// one may have answered.
    async fn catch_up(&mut self) -> Result<(), End> {
        let before = self.meet().await?;
        if let Some(endpoint) = self.source.replay.clone() {
            let from = self.stream.next();
            let is_whole = self.replay(&endpoint).await?;
            let is_same = before == Met::Same && self.meet().await? == Met::Same;
            if is_same && is_whole {
                self.stream.replay_ended();
            } else if !is_same && self.stream.next() > from {
                self.stream.replay_doubted();
            }
        }
        self.tell();
        Ok(())
    }

    /// Applies what replays bring. Whether one came to its end without a gap.
    ///
    /// A publisher drops what a reader has no room for (a ZMQ ROUTER beyond its high-water mark, 1,000 messages by itself), the
    /// end as well: what is missing inside a replay is asked for again, and only what a replay does not begin with is lost.
    async fn replay(&mut self, endpoint: &str) -> Result<bool, End> {
        for _ in 0..MOST_REPLAYS {
            let from = self.stream.next();
            if self.replay_once(endpoint).await? {
                return Ok(true);
            }
            if self.stream.next() == from {
                break;
            }
        }
        Ok(false)
    }

    async fn replay_once(&mut self, endpoint: &str) -> Result<bool, End> {
        self.worker.member.events.counts.lock().replays += 1;
        let (mut outcome, mut is_first, mut is_torn) = (Ok(()), true, false);
        let replayed = replay(endpoint, self.stream.next(), |message| {
            is_torn |= !is_first && message.sequence > self.stream.next();
            is_first = false;
            if !is_torn && outcome.is_ok() && self.stream.replayed(message.sequence) == Verdict::Apply {
                outcome = self.apply(&message);
            }
        });
        let replayed = replayed.await;
        if let Err(error) = &replayed {
            tracing::debug!(worker = %self.worker.member.spec.endpoint, %error, "replay");
        }
        outcome.map(|()| replayed.is_ok() && !is_torn)
    }

    /// Brings the index up to date, and says how far it can be believed.
    pub(super) fn tell(&mut self) {
        self.stand();
        self.tell_knowledge();
        let is_holed = matches!(self.stream.gap(), Some(Gap::Lost(_)));
        let (worker, rank) = (&self.worker.member.spec.endpoint, self.source.rank.0);
        match (std::mem::replace(&mut self.told.is_holed, is_holed), self.doubt()) {
            (false, Some(doubt)) if is_holed => {
                tracing::warn!(%worker, rank, %doubt, "not all of its blocks are known")
            }
            (true, None) => tracing::info!(%worker, rank, "nothing that was lost of its events matters any more"),
            _ => {}
        }
    }

    fn tell_knowledge(&mut self) {
        let knowledge = self.stream.knowledge();
        let before = std::mem::replace(&mut self.told.knowledge, knowledge);
        if before != knowledge {
            self.feed.know(knowledge);
        }
        self.settle();
        if before != knowledge {
            self.worker.member.changed();
        }
    }

    /// Says why not all is known, while it is connected.
    fn stand(&self) {
        self.worker.member.events.sources.doubt_of(self.source.rank, self.doubt());
    }

    /// Blocks that the engine may hold; none where nobody knows.
    pub(super) fn most_blocks(&self) -> Option<u64> {
        self.worker.member.most_blocks().filter(|_| !self.is_tiered)
    }

    fn doubt(&self) -> Option<Doubt> {
        self.stream.gap().map(|gap| match (gap, &self.source.replay) {
            (Gap::Unidentified, _) => Doubt::Unidentified,
            (Gap::Behind, Some(replay)) => Doubt::Replaying { replay: replay.clone() },
            (Gap::Behind, None) => Doubt::NoReplay,
            (Gap::Lost(stored), replay) => {
                Doubt::Lost { stored, enough: self.most_blocks().map(turned_over), replays: replay.is_some() }
            }
        })
    }

    fn settle(&mut self) {
        let worker = &self.worker;
        let now = self.feed.blocks() as u64;
        let before = std::mem::replace(&mut self.told.blocks, now);
        // The worker's blocks are the sum over its ranks.
        let mut counts = worker.member.events.counts.lock();
        counts.blocks = counts.blocks + now - before;
        drop(counts);
        if let Err(error) = worker.with.index.settle(&mut self.feed) {
            tracing::error!(worker = %worker.member.spec.endpoint, %error, "residency");
        }
    }
}

/// The block that some rank found not to fit, once one has.
async fn told(misfit: &mut watch::Receiver<Option<Tokens>>) -> Option<Tokens> {
    misfit.wait_for(Option::is_some).await.ok().and_then(|block| *block)
}
