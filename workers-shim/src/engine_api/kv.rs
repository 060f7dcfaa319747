//! KV connectors: how engines move KV between workers. One file per connector, behind one trait.
//!
//! A transfer has two legs with the same prompt: the source leg, which computes the KV or has it cached, and the target
//! leg, which fetches it. A connector defines the fields in the bodies of the legs and their order. It sends nothing.

use std::sync::Arc;

use serde::Deserialize;
use vocabulary::{DpRank, KvLinkCapability, WorkerRole};

use super::answer::HandoffParams;
use super::reverse_pull::ReversePullParams;
use crate::scrape::Scrape;

/// Fields of a leg's body: name, and value as JSON text.
pub(crate) type LegFields = Vec<(&'static str, Vec<u8>)>;

/// How engines of one kind move KV.
pub(crate) trait ConnectorProtocol: Sync {
    /// Returns the order of the legs; None where nothing is transferred.
    fn leg_order(&self) -> Option<LegOrder>;

    /// Returns which parts of a prompt can be transferred.
    fn transfer_scope(&self) -> KvLinkCapability {
        KvLinkCapability::Prefixes
    }

    /// Returns how long the source leg's answer is.
    fn source_answer_length(&self) -> SourceAnswerLength {
        SourceAnswerLength::OneToken
    }

    /// Returns the names of fields that control a transfer. They are removed from every client's body.
    fn reserved_fields(&self) -> &'static [&'static str] {
        &[]
    }

    /// Returns the fields of the source leg's body.
    fn source_fields(&self, _meeting: &TransferHandshake) -> LegFields {
        LegFields::new()
    }

    /// Returns the fields of the target leg's body. The handoff is consumed: engines generate wrong text from one that
    /// was already used.
    fn target_fields(&self, _meeting: &TransferHandshake, _handoff: Option<HandoffParams>) -> LegFields {
        LegFields::new()
    }

    /// Returns whether targets offer the KV they computed to the source leg of the session's next step.
    fn returns_kv(&self) -> ReturnsKv {
        ReturnsKv::Never
    }

    /// Returns the additional fields of the source leg's body that fetch that KV. The parameters are consumed, like a
    /// handoff.
    fn reverse_pull_fields(&self, _readback: ReversePullParams) -> LegFields {
        LegFields::new()
    }

    /// Returns whether an engine's metrics show that it uses this connector.
    fn is_shown_by(&self, _page: &Scrape) -> bool {
        false
    }

    /// Returns what an engine with these metrics lacks for this connector, if anything.
    fn missing_requirement(&self, _page: &Scrape) -> Option<&'static str> {
        None
    }

    /// Returns whether peers need the transfer endpoint of a worker with this role. A worker that only fetches may have
    /// none.
    fn needs_endpoint(&self, _role: WorkerRole) -> bool {
        true
    }

    /// Returns the URL at which the engine publishes its transfer endpoint. `configured` is the value from the
    /// configuration. None where the legs need no endpoint.
    fn discovery_url(&self, _endpoint: &str, _configured: Option<&str>) -> Option<String> {
        None
    }

    /// Parses the engine's response to [`Self::discovery_url`]. `asked` is the URL.
    fn parse_endpoint(&self, _asked: &str, _answer: &str) -> Result<TransferEndpoint, ConnectorUnavailable> {
        Ok(TransferEndpoint::default())
    }
}

/// Why an engine's transfer endpoint is not known.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ConnectorUnavailable {
    /// The URL did not respond.
    #[error("it does not answer there")]
    NoAnswer,
    /// The response is not one of Mooncake's bootstrap server.
    #[error("it is no map of ranks to engines, as Mooncake's bootstrap server answers")]
    NoRanks,
    /// The bootstrap server has no registered engines.
    #[error("no engine has registered there")]
    NoEngines,
    /// The response is not SGLang's `/server_info`.
    #[error("it is not what SGLang answers")]
    NoServerInfo,
    /// An SGLang engine that does not run disaggregated.
    #[error("its disaggregation_mode is {0:?}: start it with --disaggregation-mode prefill or decode")]
    Mode(String),
    /// An SGLang engine without a bootstrap port.
    #[error("it tells no disaggregation_bootstrap_port")]
    NoPort,
    /// The engine's role differs from the configured one.
    #[error("it is a {} worker, and configured as {}: write {endpoint}#{}", actual.as_str(), configured.as_str(), actual.as_str())]
    Role {
        /// The engine's role.
        actual: WorkerRole,
        /// The configured role.
        configured: WorkerRole,
        /// The worker's endpoint.
        endpoint: Arc<str>,
    },
}

/// Order of the legs of a transfer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LegOrder {
    /// Source first; its answer contains the parameters for the target.
    SourceFirst,
    /// Source first; the target finds the KV in a shared store, by the prompt.
    Stored,
    /// Both at once; the engines wait for each other.
    Concurrent,
}

/// Whether a target offers the KV it computed for the next step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReturnsKv {
    /// Never.
    Never,
    /// With answers that are not streamed, for the session's next step.
    WithWholeAnswers,
}

/// Length of a source leg's answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SourceAnswerLength {
    /// One token, which is discarded.
    OneToken,
    /// As the client requested: the engine itself stops after one token, which is the first of the answer.
    AsAsked,
}

/// The address at which peers fetch from an engine.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct TransferEndpoint {
    /// A URL or a host name, depending on the connector.
    pub address: String,
    /// The port, where the connector needs it separately.
    pub port: u16,
    /// Ids of the engine's data-parallel ranks, where it has several.
    pub engines: Vec<(DpRank, String)>,
    /// The engine's role, where it reports one.
    pub role: Option<WorkerRole>,
}

/// What both legs of one transfer share.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct TransferHandshake {
    /// The id of the transfer; unique.
    pub room: u64,
    /// The source's transfer endpoint.
    pub endpoint: TransferEndpoint,
    /// The source's data-parallel rank.
    pub rank: DpRank,
    /// The source's number of ranks.
    pub ranks: u16,
}

/// One transfer: the connector, and what its legs share.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct KvTransfer {
    /// The connector of both workers.
    pub connector: KvConnector,
    /// What the legs share.
    pub handshake: TransferHandshake,
}

impl KvTransfer {
    /// Returns the order of its legs; None where nothing is transferred.
    pub fn leg_order(&self) -> Option<LegOrder> {
        self.connector.dialect().leg_order()
    }

    /// Returns whether its target offers the KV it computed.
    pub fn returns_kv(&self) -> ReturnsKv {
        self.connector.dialect().returns_kv()
    }
}

/// Defines the connectors, one per line: the file, the enum variant, and (in lower case) the name in the configuration.
macro_rules! dialects {
    ($($(#[$says:meta])* $arm:ident = $file:ident :: $protocol:ident),* $(,)?) => {
        $(mod $file;)*

        /// The KV connector of a worker.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Deserialize)]
        #[serde(rename_all = "snake_case")]
        pub enum KvConnector {
            $($(#[$says])* $arm),*
        }

        impl KvConnector {
            /// All connectors.
            pub const ALL: &[KvConnector] = &[$(KvConnector::$arm),*];

            /// Returns the implementation.
            pub(crate) fn dialect(self) -> &'static dyn ConnectorProtocol {
                match self {
                    $(KvConnector::$arm => &$file::$protocol),*
                }
            }

            /// Returns the name used in configuration and logs.
            pub fn as_str(self) -> &'static str {
                match self {
                    $(KvConnector::$arm => stringify!($file)),*
                }
            }
        }
    };
}

dialects! {
    /// No transfers: a worker computes all KV that it lacks.
    #[default]
    None = none::NoConnector,
    /// vLLM's NIXL connector.
    Nixl = nixl::NixlConnector,
    /// vLLM's NIXL connector where both sides run with `bidirectional_kv_xfer`.
    NixlBidirectional = nixl_bidirectional::NixlBidirectionalConnector,
    /// vLLM's Mooncake connector.
    Mooncake = mooncake::MooncakeConnector,
    /// A store that workers share: vLLM's ExampleConnector, LMCache, Mooncake Store.
    SharedStore = shared_store::SharedStoreConnector,
    /// SGLang's prefill and decode workers, which meet at a bootstrap server.
    Sglang = sglang::SglangConnector,
}

impl KvConnector {
    /// Detects the connector from an engine's metrics; `None` where they show none.
    pub fn from_metrics(scrape: &Scrape) -> Self {
        Self::ALL.iter().copied().find(|spoken| spoken.dialect().is_shown_by(scrape)).unwrap_or_default()
    }
}

/// Returns the reserved fields of all connectors.
pub(super) fn reserved_fields() -> impl Iterator<Item = &'static str> {
    KvConnector::ALL.iter().flat_map(|spoken| spoken.dialect().reserved_fields().iter().copied())
}

fn json(value: serde_json::Value) -> Vec<u8> {
    value.to_string().into_bytes()
}

#[cfg(test)]
mod tests;
