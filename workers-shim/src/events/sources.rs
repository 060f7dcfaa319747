//! A worker's event sources: which of them are connected, and why its blocks are not known exactly. Written by whoever
//! follows them, read by operators.

use std::collections::BTreeMap;
use std::fmt;

use parking_lot::Mutex;
use vocabulary::{DpRank, ModelId, Tokens};

use super::discovery::EventSource;

/// How many event sources a worker has.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SourceCount {
    /// Configured, or told by the worker.
    pub configured: usize,
    /// Of these, the ones that are heard.
    pub connected: usize,
}

/// Why a worker's blocks are not known exactly. As text it says what to do.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum Doubt {
    /// It was not reached yet, or is not any more.
    #[default]
    Unreached,
    /// It tells no events.
    Silent,
    /// Its models' tokens are not known here.
    Wordless(Option<ModelId>),
    /// Its blocks are not made of whole chain blocks.
    Misfit {
        /// What it serves.
        model: ModelId,
        /// Tokens in one of its blocks.
        block: Tokens,
        /// Tokens a chain block.
        chain: Tokens,
    },
    /// A source is not connected.
    Unconnected {
        /// `tcp://host:port` of its live stream.
        live: String,
    },
    /// Another process answers there than the one that was followed.
    Replaced,
    /// Nobody knows which process speaks.
    Unidentified,
    /// What was said before is not heard yet, and a replay of it was asked for.
    Replaying {
        /// `tcp://host:port` of the replay.
        replay: String,
    },
    /// What was said before is not heard yet, and nobody can be asked.
    NoReplay,
    /// Events are lost for good.
    Lost {
        /// Engine blocks stored since.
        stored: u64,
        /// How many end the doubt, where that is known.
        enough: Option<u64>,
        /// Whether somebody can be asked for what was missed.
        replays: bool,
    },
}

impl fmt::Display for Doubt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Doubt::Unreached => {
                write!(f, "it was not reached yet, or is not any more: see that it answers GET /health")
            }
            Doubt::Silent => write!(
                f,
                "it tells no KV events: start it with --kv-events-config, and set `events` and `replay` of its [[workers]] \
                 entry where it does not answer GET /kv_event_sources"
            ),
            Doubt::Wordless(model) => {
                let name = model.as_ref().map_or("NAME", |model| &model.0);
                write!(
                    f,
                    "the tokens of its prompts are not known here: set `models.{name}.text` to the model's folder"
                )
            }
            Doubt::Misfit { model, block, chain } => write!(
                f,
                "its blocks of {} tokens are not whole chain blocks of {}: set `models.{}.block` to a number that divides {}, \
                 and the block of every other engine of the model",
                block.0, chain.0, model.0, block.0
            ),
            Doubt::Unconnected { live } => write!(
                f,
                "nothing answers at {live}, where its KV events should come from: see that the engine publishes there \
                 (--kv-events-config), that this host reaches it, and that `events` of its [[workers]] entry, if set, is right"
            ),
            Doubt::Replaced => write!(
                f,
                "another process answers GET /metrics than the one whose events were followed: it is followed as soon as a \
                 probe has met it; if that stays so, see that only one engine is behind its URL"
            ),
            Doubt::Unidentified => write!(
                f,
                "GET /metrics does not tell which process it is (process_start_time_seconds), so a restart would not be \
                 noticed: see that this host can read it, and that the engine runs one API server"
            ),
            Doubt::Replaying { replay } => write!(
                f,
                "what it said before is not replayed yet: if that stays so, see that {replay} answers (`replay_endpoint` of \
                 --kv-events-config, `replay` of its [[workers]] entry)"
            ),
            Doubt::NoReplay => write!(
                f,
                "nobody can be asked for what it said before: set `replay_endpoint` of its --kv-events-config, and `replay` of \
                 its [[workers]] entry where `events` is set"
            ),
            Doubt::Lost { stored, enough, replays: true } => lost(f, (*stored, *enough), TOO_LONG_AGO),
            Doubt::Lost { stored, enough, replays: false } => lost(f, (*stored, *enough), NOBODY_TO_ASK),
        }
    }
}

/// So that no events are lost again: where they are replayed, and where they are not.
const TOO_LONG_AGO: &str = "raise `buffer_steps` of its --kv-events-config";
const NOBODY_TO_ASK: &str =
    "set `replay_endpoint` of its --kv-events-config, and `replay` of its [[workers]] entry where `events` is set";

/// Of events that are lost for good.
fn lost(f: &mut fmt::Formatter<'_>, (stored, enough): (u64, Option<u64>), advice: &str) -> fmt::Result {
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

impl Doubt {
    /// Whether nobody listens to the source.
    fn is_unheard(&self) -> bool {
        matches!(self, Doubt::Unconnected { .. } | Doubt::Replaced | Doubt::Misfit { .. })
    }
}

/// All sources of a worker, as they stand.
#[derive(Default)]
pub(crate) struct Sources(Mutex<State>);

#[derive(Default)]
struct State {
    /// Why the blocks of each rank are not known exactly; none where they are.
    doubts: BTreeMap<DpRank, Option<Doubt>>,
    /// While no source is followed.
    why_none: Doubt,
}

impl Sources {
    /// These are followed from now on; none is heard yet.
    pub(super) fn follow(&self, sources: &[EventSource]) {
        let unheard = |source: &EventSource| (source.rank, Some(Doubt::Unconnected { live: source.live.clone() }));
        self.0.lock().doubts = sources.iter().map(unheard).collect();
    }

    pub(super) fn follow_none(&self, why: Doubt) {
        *self.0.lock() = State { doubts: BTreeMap::new(), why_none: why };
    }

    /// How well a rank is known now.
    pub(super) fn doubt_of(&self, rank: DpRank, doubt: Option<Doubt>) {
        if let Some(known) = self.0.lock().doubts.get_mut(&rank) {
            *known = doubt;
        }
    }

    pub(crate) fn count(&self) -> SourceCount {
        let state = self.0.lock();
        let is_connected = |doubt: &&Option<Doubt>| !doubt.as_ref().is_some_and(Doubt::is_unheard);
        SourceCount { configured: state.doubts.len(), connected: state.doubts.values().filter(is_connected).count() }
    }

    /// Why the worker's blocks are not known exactly: of several ranks the first that is in doubt. None where they are.
    pub(crate) fn doubt(&self) -> Option<Doubt> {
        let state = self.0.lock();
        if state.doubts.is_empty() {
            return Some(state.why_none.clone());
        }
        state.doubts.values().flatten().next().cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(rank: u16) -> EventSource {
        EventSource { rank: DpRank(rank), live: format!("tcp://a:{rank}"), replay: None }
    }

    #[test]
    fn a_worker_is_in_doubt_until_each_of_its_sources_is_not() {
        let sources = Sources::default();
        assert_eq!((sources.count(), sources.doubt()), (SourceCount::default(), Some(Doubt::Unreached)));
        sources.follow(&[source(0), source(1)]);
        sources.doubt_of(DpRank(0), None);
        assert_eq!(sources.count(), SourceCount { configured: 2, connected: 1 });
        assert_eq!(sources.doubt(), Some(Doubt::Unconnected { live: "tcp://a:1".into() }));
        sources.doubt_of(DpRank(1), Some(Doubt::NoReplay));
        assert_eq!((sources.count().connected, sources.doubt()), (2, Some(Doubt::NoReplay)));
        sources.doubt_of(DpRank(1), Some(Doubt::Replaced));
        assert_eq!(sources.count().connected, 1, "nobody listens to it");
        sources.doubt_of(DpRank(1), None);
        assert_eq!(sources.doubt(), None);
        sources.follow_none(Doubt::Silent);
        assert_eq!((sources.count(), sources.doubt()), (SourceCount::default(), Some(Doubt::Silent)));
    }

    #[test]
    fn each_doubt_names_what_to_look_at() {
        let text = |doubt: Doubt| doubt.to_string();
        let model = ModelId::from("tiny");
        let misfit = Doubt::Misfit { model: model.clone(), block: Tokens(10), chain: Tokens(4) };
        let lost = |enough| Doubt::Lost { stored: 7, enough, replays: true };
        let all = [
            (Doubt::Unreached, "GET /health"),
            (Doubt::Silent, "--kv-events-config"),
            (Doubt::Wordless(Some(model)), "`models.tiny.text`"),
            (Doubt::Wordless(None), "`models.NAME.text`"),
            (misfit, "`models.tiny.block` to a number that divides 10"),
            (Doubt::Unconnected { live: "tcp://a:1".into() }, "tcp://a:1"),
            (Doubt::Replaced, "one engine is behind its URL"),
            (Doubt::Unidentified, "GET /metrics"),
            (Doubt::Replaying { replay: "tcp://a:2".into() }, "tcp://a:2"),
            (Doubt::NoReplay, "`replay_endpoint`"),
            (lost(Some(20)), "7 of the 20 blocks"),
            (lost(None), "POST /reset_prefix_cache"),
            (lost(None), "`buffer_steps`"),
            (Doubt::Lost { stored: 7, enough: None, replays: false }, "`replay_endpoint`"),
        ];
        for (doubt, named) in all {
            assert!(text(doubt.clone()).contains(named), "{doubt:?}: {doubt}");
        }
    }
}
