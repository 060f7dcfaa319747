//! The dialects in which engines hand KV over: one file each, behind one trait.
//!
//! A transfer has two legs with the same prompt: one at the source, which computes or has it, one at the target, which
//! fetches it. A dialect says what the legs' bodies carry and in what order they go. It sends nothing.

use std::sync::Arc;

use serde::Deserialize;
use vocabulary::{Carries, DpRank, Role};

use super::answer::Handoff;
use super::readback::Readback;
use crate::scrape::Scrape;

/// Fields of a leg's body: name, and value as JSON.
pub(crate) type Fields = Vec<(&'static str, Vec<u8>)>;

/// How engines of one kind hand KV over.
pub(crate) trait Dialect: Sync {
    /// In what order the legs go; none where nothing is handed over.
    fn order(&self) -> Option<Order>;

    /// What can be handed over.
    fn carries(&self) -> Carries {
        Carries::Prefixes
    }

    /// How long the source leg's answer is.
    fn source_answer(&self) -> SourceAnswer {
        SourceAnswer::OneToken
    }

    /// The fields that mean a transfer: what a client sends there reaches no engine.
    fn reserved(&self) -> &'static [&'static str] {
        &[]
    }

    /// What the source leg's body carries.
    fn at_source(&self, _meeting: &Meeting) -> Fields {
        Fields::new()
    }

    /// What the target leg's body carries. A handoff is used up: engines give wrong text for one that was used before.
    fn at_target(&self, _meeting: &Meeting, _handoff: Option<Handoff>) -> Fields {
        Fields::new()
    }

    /// Whether targets hand back what they have computed, for the source leg of the session's next step.
    fn hands_back(&self) -> HandsBack {
        HandsBack::Never
    }

    /// What the source leg's body carries besides, to fetch that. It is used up like a handoff.
    fn read_back(&self, _readback: Readback) -> Fields {
        Fields::new()
    }

    /// Whether an engine's metrics show that it speaks this.
    fn shown_by(&self, _page: &Scrape) -> bool {
        false
    }

    /// What an engine with these metrics lacks for it.
    fn missing(&self, _page: &Scrape) -> Option<&'static str> {
        None
    }

    /// Whether others meet a worker of this role: one that only fetches may have no such place.
    fn is_met(&self, _role: Role) -> bool {
        true
    }

    /// The URL at which an engine tells where legs meet, and `configured` what stands in the configuration; none where
    /// legs need no such place.
    fn asks(&self, _endpoint: &str, _configured: Option<&str>) -> Option<String> {
        None
    }

    /// The place that the answer tells, or what is missing. `asked` is the URL.
    fn place(&self, _asked: &str, _answer: &str) -> Result<Place, Unmet> {
        Ok(Place::default())
    }
}

/// Why nobody knows where an engine is met.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Unmet {
    /// Nobody answers at that place.
    #[error("it does not answer there")]
    Silent,
    /// No answer of Mooncake's.
    #[error("it is no map of ranks to engines, as Mooncake's bootstrap server answers")]
    NoRanks,
    /// A bootstrap server without engines.
    #[error("no engine has registered there")]
    Nobody,
    /// No answer of SGLang's.
    #[error("it is not what SGLang answers")]
    NoServerInfo,
    /// An SGLang engine that hands nothing over.
    #[error("its disaggregation_mode is {0:?}: start it with --disaggregation-mode prefill or decode")]
    Mode(String),
    /// An SGLang engine without a bootstrap server.
    #[error("it tells no disaggregation_bootstrap_port")]
    NoPort,
    /// Another role than the configured one.
    #[error("it is a {} worker, and configured as {}: write {endpoint}#{}", is.as_str(), configured.as_str(), is.as_str())]
    Role {
        /// What it is.
        is: Role,
        /// What it was taken for.
        configured: Role,
        /// Where it is.
        endpoint: Arc<str>,
    },
}

/// In what order legs go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Order {
    /// The source first; its answer tells what the target has to send.
    Handed,
    /// The source first; the target finds the KV by the prompt.
    Stored,
    /// Both at once; they wait for each other.
    Together,
}

/// Whether a target hands back what it has computed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HandsBack {
    /// It does not.
    Never,
    /// With an answer that comes whole, for the session's next step.
    WithWholeAnswers,
}

/// How long a source leg's answer is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SourceAnswer {
    /// One token, whatever it is.
    OneToken,
    /// As the client asked: the engine ends after the first token by itself, which is the answer's first.
    AsAsked,
}

/// Where an engine meets those who fetch from it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Place {
    /// A URL or a host, as the dialect needs it.
    pub address: String,
    /// Its port, where the dialect tells it apart.
    pub port: u16,
    /// Names of the engine's data-parallel ranks, where it has any.
    pub engines: Vec<(DpRank, String)>,
    /// What it is for, where it tells.
    pub role: Option<Role>,
}

/// What both legs of one transfer know of each other.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Meeting {
    /// The transfer's number; no other has it.
    pub room: u64,
    /// Where the source is met.
    pub place: Place,
    /// The source's rank.
    pub rank: DpRank,
    /// How many ranks the source has.
    pub ranks: u16,
}

/// One transfer: the dialect, and what its legs know of each other.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Transfer {
    /// The dialect of both workers.
    pub spoken: Spoken,
    /// Where they meet.
    pub meeting: Meeting,
}

impl Transfer {
    /// In what order its legs go; none where nothing is handed over.
    pub fn order(&self) -> Option<Order> {
        self.spoken.dialect().order()
    }

    /// Whether its target hands back what it has computed.
    pub fn hands_back(&self) -> HandsBack {
        self.spoken.dialect().hands_back()
    }
}

/// One line here is a dialect: its file, its arm, and its name in lower case in the configuration.
macro_rules! dialects {
    ($($(#[$says:meta])* $arm:ident = $file:ident),* $(,)?) => {
        $(mod $file;)*

        /// Which dialect a worker speaks.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Deserialize)]
        #[serde(rename_all = "lowercase")]
        pub enum Spoken {
            $($(#[$says])* $arm),*
        }

        impl Spoken {
            /// All of them.
            pub const ALL: &[Spoken] = &[$(Spoken::$arm),*];

            /// What it means.
            pub(crate) fn dialect(self) -> &'static dyn Dialect {
                match self {
                    $(Spoken::$arm => &$file::Speaker),*
                }
            }

            /// The word for configuration and logs.
            pub fn as_str(self) -> &'static str {
                match self {
                    $(Spoken::$arm => stringify!($file)),*
                }
            }
        }
    };
}

dialects! {
    /// OpenAI's API and no transfers: whoever lacks KV computes it.
    #[default]
    Plain = plain,
    /// vLLM's NIXL connector.
    Nixl = nixl,
    /// The same where both sides run with `bidirectional_kv_xfer`.
    Bidirectional = bidirectional,
    /// vLLM's Mooncake connector.
    Mooncake = mooncake,
    /// A store that workers share: vLLM's ExampleConnector, LMCache, Mooncake's store.
    Store = store,
    /// SGLang's prefill and decode workers, which meet at a bootstrap server.
    Sglang = sglang,
}

impl Spoken {
    /// The dialect of an engine with these metrics; plain where they show none.
    pub fn shown_by(page: &Scrape) -> Self {
        Self::ALL.iter().copied().find(|spoken| spoken.dialect().shown_by(page)).unwrap_or_default()
    }
}

/// All dialects' reserved fields.
pub(super) fn reserved() -> impl Iterator<Item = &'static str> {
    Spoken::ALL.iter().flat_map(|spoken| spoken.dialect().reserved().iter().copied())
}

fn json(value: serde_json::Value) -> Vec<u8> {
    value.to_string().into_bytes()
}

#[cfg(test)]
mod tests;
