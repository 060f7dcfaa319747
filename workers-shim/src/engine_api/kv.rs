//! The dialects in which engines hand KV over: one file each, behind one trait.
//!
//! A transfer has two legs with the same prompt: one at the source, which computes or has it, one at the target, which
//! fetches it. A dialect says what the legs' bodies carry and in what order they go. It sends nothing.

use std::sync::Arc;

use serde::Deserialize;
use vocabulary::{DpRank, KvLinkMode, WorkerRole};

use super::answer::HandoffParams;
use super::reverse_pull::ReversePullParams;
use crate::scrape::Scrape;

/// Fields of a leg's body: name, and value as JSON.
pub(crate) type LegFields = Vec<(&'static str, Vec<u8>)>;

/// How engines of one kind hand KV over.
pub(crate) trait ConnectorProtocol: Sync {
    /// In what order the legs go; none where nothing is handed over.
    fn leg_order(&self) -> Option<LegOrder>;

    /// What can be handed over.
    fn transfer_scope(&self) -> KvLinkMode {
        KvLinkMode::Prefixes
    }

    /// How long the source leg's answer is.
    fn source_answer_length(&self) -> SourceAnswerLength {
        SourceAnswerLength::OneToken
    }

    /// The fields that mean a transfer: what a client sends there reaches no engine.
    fn reserved_fields(&self) -> &'static [&'static str] {
        &[]
    }

    /// What the source leg's body carries.
    fn source_fields(&self, _meeting: &TransferHandshake) -> LegFields {
        LegFields::new()
    }

    /// What the target leg's body carries. A handoff is used up: engines give wrong text for one that was used before.
    fn target_fields(&self, _meeting: &TransferHandshake, _handoff: Option<HandoffParams>) -> LegFields {
        LegFields::new()
    }

    /// Whether targets hand back what they have computed, for the source leg of the session's next step.
    fn returns_kv(&self) -> ReturnsKv {
        ReturnsKv::Never
    }

    /// What the source leg's body carries besides, to fetch that. It is used up like a handoff.
    fn reverse_pull_fields(&self, _readback: ReversePullParams) -> LegFields {
        LegFields::new()
    }

    /// Whether an engine's metrics show that it speaks this.
    fn is_shown_by(&self, _page: &Scrape) -> bool {
        false
    }

    /// What an engine with these metrics lacks for it.
    fn missing_requirement(&self, _page: &Scrape) -> Option<&'static str> {
        None
    }

    /// Whether others meet a worker of this role: one that only fetches may have no such place.
    fn needs_endpoint(&self, _role: WorkerRole) -> bool {
        true
    }

    /// The URL at which an engine tells where legs meet, and `configured` what stands in the configuration; none where
    /// legs need no such place.
    fn discovery_url(&self, _endpoint: &str, _configured: Option<&str>) -> Option<String> {
        None
    }

    /// The place that the answer tells, or what is missing. `asked` is the URL.
    fn parse_endpoint(&self, _asked: &str, _answer: &str) -> Result<TransferEndpoint, ConnectorUnavailable> {
        Ok(TransferEndpoint::default())
    }
}

/// Why nobody knows where an engine is met.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ConnectorUnavailable {
    /// Nobody answers at that place.
    #[error("it does not answer there")]
    NoAnswer,
    /// No answer of Mooncake's.
    #[error("it is no map of ranks to engines, as Mooncake's bootstrap server answers")]
    NoRanks,
    /// A bootstrap server without engines.
    #[error("no engine has registered there")]
    NoEngines,
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
    #[error("it is a {} worker, and configured as {}: write {endpoint}#{}", actual.as_str(), configured.as_str(), actual.as_str())]
    Role {
        /// What it is.
        actual: WorkerRole,
        /// What it was taken for.
        configured: WorkerRole,
        /// Where it is.
        endpoint: Arc<str>,
    },
}

/// In what order legs go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LegOrder {
    /// The source first; its answer tells what the target has to send.
    SourceFirst,
    /// The source first; the target finds the KV by the prompt.
    Stored,
    /// Both at once; they wait for each other.
    Concurrent,
}

/// Whether a target hands back what it has computed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReturnsKv {
    /// It does not.
    Never,
    /// With an answer that comes whole, for the session's next step.
    WithWholeAnswers,
}

/// How long a source leg's answer is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SourceAnswerLength {
    /// One token, whatever it is.
    OneToken,
    /// As the client asked: the engine ends after the first token by itself, which is the answer's first.
    AsAsked,
}

/// Where an engine meets those who fetch from it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct TransferEndpoint {
    /// A URL or a host, as the dialect needs it.
    pub address: String,
    /// Its port, where the dialect tells it apart.
    pub port: u16,
    /// Names of the engine's data-parallel ranks, where it has any.
    pub engines: Vec<(DpRank, String)>,
    /// What it is for, where it tells.
    pub role: Option<WorkerRole>,
}

/// What both legs of one transfer know of each other.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct TransferHandshake {
    /// The transfer's number; no other has it.
    pub room: u64,
    /// Where the source is met.
    pub endpoint: TransferEndpoint,
    /// The source's rank.
    pub rank: DpRank,
    /// How many ranks the source has.
    pub ranks: u16,
}

/// One transfer: the dialect, and what its legs know of each other.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct KvTransfer {
    /// The dialect of both workers.
    pub connector: KvConnector,
    /// Where they meet.
    pub handshake: TransferHandshake,
}

impl KvTransfer {
    /// In what order its legs go; none where nothing is handed over.
    pub fn leg_order(&self) -> Option<LegOrder> {
        self.connector.dialect().leg_order()
    }

    /// Whether its target hands back what it has computed.
    pub fn returns_kv(&self) -> ReturnsKv {
        self.connector.dialect().returns_kv()
    }
}

/// One line here is a dialect: its file, its arm, and its name in lower case in the configuration.
macro_rules! dialects {
    ($($(#[$says:meta])* $arm:ident = $file:ident :: $protocol:ident),* $(,)?) => {
        $(mod $file;)*

        /// Which dialect a worker speaks.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Deserialize)]
        #[serde(rename_all = "lowercase")]
        pub enum KvConnector {
            $($(#[$says])* $arm),*
        }

        impl KvConnector {
            /// All of them.
            pub const ALL: &[KvConnector] = &[$(KvConnector::$arm),*];

            /// What it means.
            pub(crate) fn dialect(self) -> &'static dyn ConnectorProtocol {
                match self {
                    $(KvConnector::$arm => &$file::$protocol),*
                }
            }

            /// The word for configuration and logs.
            pub fn as_str(self) -> &'static str {
                match self {
                    $(KvConnector::$arm => stringify!($file)),*
                }
            }
        }
    };
}

dialects! {
    /// OpenAI's API and no transfers: whoever lacks KV computes it.
    #[default]
    Plain = plain::PlainConnector,
    /// vLLM's NIXL connector.
    Nixl = nixl::NixlConnector,
    /// The same where both sides run with `bidirectional_kv_xfer`.
    Bidirectional = bidirectional::BidirectionalConnector,
    /// vLLM's Mooncake connector.
    Mooncake = mooncake::MooncakeConnector,
    /// A store that workers share: vLLM's ExampleConnector, LMCache, Mooncake's store.
    Store = store::StoreConnector,
    /// SGLang's prefill and decode workers, which meet at a bootstrap server.
    Sglang = sglang::SglangConnector,
}

impl KvConnector {
    /// The dialect of an engine with these metrics; plain where they show none.
    pub fn from_metrics(page: &Scrape) -> Self {
        Self::ALL.iter().copied().find(|spoken| spoken.dialect().is_shown_by(page)).unwrap_or_default()
    }
}

/// All dialects' reserved fields.
pub(super) fn reserved_fields() -> impl Iterator<Item = &'static str> {
    KvConnector::ALL.iter().flat_map(|spoken| spoken.dialect().reserved_fields().iter().copied())
}

fn json(value: serde_json::Value) -> Vec<u8> {
    value.to_string().into_bytes()
}

#[cfg(test)]
mod tests;
