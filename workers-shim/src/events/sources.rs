//! State of a worker's event sources: which are connected, and why its blocks are not known exactly. Written by
//! followers, shown to operators. Also counts a worker's events, for metrics.

use std::collections::BTreeMap;
use std::fmt;

use parking_lot::Mutex;
use vocabulary::{DpRank, Micros, ModelId, Tokens};

use super::discovery::EventSource;

/// Number of event sources of a worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct EventSourceCount {
    /// Sources that are configured or were reported by the worker.
    pub configured: usize,
    /// Sources of these that are connected.
    pub connected: usize,
}

/// Why a worker's blocks are not known exactly. Its Display text says what to do.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum InexactReason {
    /// The worker has not been reached yet, or is unreachable now.
    #[default]
    Unreachable,
    /// The worker publishes no events.
    NoEvents,
    /// No tokenizer is configured for its models.
    NoTextModel(Option<ModelId>),
    /// Its block size is not a multiple of the chain block size.
    Misfit {
        /// The served model.
        model: ModelId,
        /// Tokens per engine block.
        block: Tokens,
        /// Tokens per chain block.
        chain: Tokens,
    },
    /// A source is not connected.
    Unconnected {
        /// `tcp://host:port` of its live stream.
        live: String,
    },
    /// Another process answers than the one that was followed.
    Replaced,
    /// The process does not identify itself.
    Unidentified,
    /// Earlier events are missing, and a replay was requested.
    Replaying {
        /// `tcp://host:port` of the replay socket.
        replay: String,
    },
    /// Earlier events are missing, and there is no replay socket.
    NoReplay,
    /// Events are lost for good.
    Lost {
        /// Engine blocks stored since then.
        stored: u64,
        /// How many stored blocks make the loss irrelevant (a full turnover of the cache), if known.
        needed: Option<u64>,
        /// Whether the source has a replay socket.
        replays: bool,
    },
}

impl fmt::Display for InexactReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            InexactReason::Unreachable => {
                write!(f, "it was not reached yet, or is not any more: see that it answers GET /health")
            }
            InexactReason::NoEvents => write!(
                f,
                "it publishes no KV events: start it with --kv-events-config, and set `kv_events_endpoint` and `kv_events_replay_endpoint` of its [[workers]] \
                 entry where it does not answer GET /kv_event_sources"
            ),
            InexactReason::NoTextModel(model) => {
                let name = model.as_ref().map_or("NAME", |model| &model.0);
                write!(
                    f,
                    "the tokens of its prompts are not known here: set `models.{name}.tokenizer_dir` to the model's folder"
                )
            }
            InexactReason::Misfit { model, block, chain } => write!(
                f,
                "its blocks of {} tokens are not whole chain blocks of {}: set `models.{}.block_size` to a number that divides {}, \
                 and the block of every other engine of the model",
                block.0, chain.0, model.0, block.0
            ),
            InexactReason::Unconnected { live } => write!(
                f,
                "nothing answers at {live}, where its KV events should come from: see that the engine publishes there \
                 (--kv-events-config), that this host reaches it, and that `kv_events_endpoint` of its [[workers]] entry, if set, is right"
            ),
            InexactReason::Replaced => write!(
                f,
                "another process answers GET /metrics than the one whose events were followed: it is followed as soon as a \
                 probe has met it; if that stays so, see that only one engine is behind its URL"
            ),
            InexactReason::Unidentified => write!(
                f,
                "GET /metrics does not tell which process it is (process_start_time_seconds), so a restart would not be \
                 noticed: see that this host can read it, and that the engine runs one API server"
            ),
            InexactReason::Replaying { replay } => write!(
                f,
                "earlier events are not replayed yet: if this persists, check that {replay} answers (`replay_endpoint` of \
                 --kv-events-config, `kv_events_replay_endpoint` of its [[workers]] entry)"
            ),
            InexactReason::NoReplay => write!(
                f,
                "earlier events cannot be replayed: set `replay_endpoint` of its --kv-events-config, and `kv_events_replay_endpoint` of \
                 its [[workers]] entry where `kv_events_endpoint` is set"
            ),
            InexactReason::Lost { stored, needed: enough, replays: true } => {
                write_loss(f, (*stored, *enough), RAISE_BUFFER_ADVICE)
            }
            InexactReason::Lost { stored, needed: enough, replays: false } => {
                write_loss(f, (*stored, *enough), SET_REPLAY_ADVICE)
            }
        }
    }
}

/// How to prevent another loss, with a replay socket and without.
const RAISE_BUFFER_ADVICE: &str = "raise `buffer_steps` of its --kv-events-config";
const SET_REPLAY_ADVICE: &str = "set `replay_endpoint` of its --kv-events-config, and `kv_events_replay_endpoint` of its [[workers]] entry where `kv_events_endpoint` is set";

/// Writes the text for lost events.
fn write_loss(f: &mut fmt::Formatter<'_>, (stored, enough): (u64, Option<u64>), advice: &str) -> fmt::Result {
    write!(f, "events were lost for good; ")?;
    match enough {
        Some(enough) => write!(f, "it has stored {stored} of the {enough} blocks that end this")?,
        None => write!(f, "how many blocks it can hold is not known, so no number of new ones ends this")?,
    }
    write!(
        f,
        ", as do a reset of its prefix cache (POST /reset_prefix_cache at the engine) and a restart; so that it does not \
         happen again, {advice}"
    )
}

impl InexactReason {
    /// Returns whether the source counts as not connected.
    fn is_disconnected(&self) -> bool {
        matches!(self, InexactReason::Unconnected { .. } | InexactReason::Replaced | InexactReason::Misfit { .. })
    }
}

/// The current state of all event sources of a worker.
#[derive(Default)]
pub(crate) struct EventSourceStates(Mutex<InexactReasons>);

#[derive(Default)]
struct InexactReasons {
    /// Why the blocks of each rank are not known exactly; None where they are.
    reasons: BTreeMap<DpRank, Option<InexactReason>>,
    /// The reason while no source is followed.
    no_sources_reason: InexactReason,
}

impl EventSourceStates {
    /// Sets the followed sources; none is connected yet.
    pub(super) fn set_sources(&self, sources: &[EventSource]) {
        let unheard =
            |source: &EventSource| (source.rank, Some(InexactReason::Unconnected { live: source.live.clone() }));
        self.0.lock().reasons = sources.iter().map(unheard).collect();
    }

    pub(super) fn set_no_sources(&self, why: InexactReason) {
        *self.0.lock() = InexactReasons { reasons: BTreeMap::new(), no_sources_reason: why };
    }

    /// Sets why a rank's blocks are not known exactly; None if they are.
    pub(super) fn set_reason(&self, rank: DpRank, doubt: Option<InexactReason>) {
        if let Some(known) = self.0.lock().reasons.get_mut(&rank) {
            *known = doubt;
        }
    }

    pub(crate) fn count(&self) -> EventSourceCount {
        let state = self.0.lock();
        let is_connected = |doubt: &&Option<InexactReason>| !doubt.as_ref().is_some_and(InexactReason::is_disconnected);
        EventSourceCount {
            configured: state.reasons.len(),
            connected: state.reasons.values().filter(is_connected).count(),
        }
    }

    /// Returns why the worker's blocks are not known exactly: the reason of its first inexact rank. None if all are
    /// exact.
    pub(crate) fn inexact_reason(&self) -> Option<InexactReason> {
        let state = self.0.lock();
        if state.reasons.is_empty() {
            return Some(state.no_sources_reason.clone());
        }
        state.reasons.values().flatten().next().cloned()
    }
}

/// Counters of a worker's events.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct EventCounts {
    /// Messages applied.
    pub batches: u64,
    /// Events in them.
    pub events: u64,
    /// Gaps in the sequence, each followed by a replay.
    pub gaps: u64,
    /// Requested replays, including those at the start.
    pub replays: u64,
    /// Messages that could not be decoded.
    pub undecodable: u64,
    /// Stored blocks whose parent is unknown, and removals of unknown blocks.
    pub unknown_blocks: u64,
    /// Detected restarts of the engine process.
    pub engine_restarts: u64,
    /// Snapshots adopted from other routers.
    pub peer_snapshots: u64,
    /// Engine blocks in the index now.
    pub blocks: u64,
    /// Delay between the engine's timestamp in the last message and its receipt.
    pub lag: Micros,
}

#[derive(Default)]
pub(crate) struct WorkerEventStatus {
    /// The state of the event sources.
    pub(crate) sources: EventSourceStates,
    pub(super) counts: Mutex<EventCounts>,
}

impl WorkerEventStatus {
    pub(crate) fn counts(&self) -> EventCounts {
        *self.counts.lock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(rank: u16) -> EventSource {
        EventSource { rank: DpRank(rank), live: format!("tcp://a:{rank}"), replay: None }
    }

    #[test]
    fn worker_is_inexact_until_every_event_source_is_exact() {
        let sources = EventSourceStates::default();
        assert_eq!(
            (sources.count(), sources.inexact_reason()),
            (EventSourceCount::default(), Some(InexactReason::Unreachable))
        );
        sources.set_sources(&[source(0), source(1)]);
        sources.set_reason(DpRank(0), None);
        assert_eq!(sources.count(), EventSourceCount { configured: 2, connected: 1 });
        assert_eq!(sources.inexact_reason(), Some(InexactReason::Unconnected { live: "tcp://a:1".into() }));
        sources.set_reason(DpRank(1), Some(InexactReason::NoReplay));
        assert_eq!((sources.count().connected, sources.inexact_reason()), (2, Some(InexactReason::NoReplay)));
        sources.set_reason(DpRank(1), Some(InexactReason::Replaced));
        assert_eq!(sources.count().connected, 1, "nobody listens to it");
        sources.set_reason(DpRank(1), None);
        assert_eq!(sources.inexact_reason(), None);
        sources.set_no_sources(InexactReason::NoEvents);
        assert_eq!(
            (sources.count(), sources.inexact_reason()),
            (EventSourceCount::default(), Some(InexactReason::NoEvents))
        );
    }

    #[test]
    fn every_inexact_reason_names_what_to_check() {
        let text = |doubt: InexactReason| doubt.to_string();
        let model = ModelId::from("tiny");
        let misfit = InexactReason::Misfit { model: model.clone(), block: Tokens(10), chain: Tokens(4) };
        let lost = |enough| InexactReason::Lost { stored: 7, needed: enough, replays: true };
        let all = [
            (InexactReason::Unreachable, "GET /health"),
            (InexactReason::NoEvents, "--kv-events-config"),
            (InexactReason::NoTextModel(Some(model)), "`models.tiny.tokenizer_dir`"),
            (InexactReason::NoTextModel(None), "`models.NAME.tokenizer_dir`"),
            (misfit, "`models.tiny.block_size` to a number that divides 10"),
            (InexactReason::Unconnected { live: "tcp://a:1".into() }, "tcp://a:1"),
            (InexactReason::Replaced, "one engine is behind its URL"),
            (InexactReason::Unidentified, "GET /metrics"),
            (InexactReason::Replaying { replay: "tcp://a:2".into() }, "tcp://a:2"),
            (InexactReason::NoReplay, "`replay_endpoint`"),
            (lost(Some(20)), "7 of the 20 blocks"),
            (lost(None), "POST /reset_prefix_cache"),
            (lost(None), "`buffer_steps`"),
            (InexactReason::Lost { stored: 7, needed: None, replays: false }, "`replay_endpoint`"),
        ];
        for (doubt, named) in all {
            assert!(text(doubt.clone()).contains(named), "{doubt:?}: {doubt}");
        }
    }
}
