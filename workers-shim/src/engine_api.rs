//! Engine APIs: builds the request bodies of a plan's legs from the client's body, and reads engines' answers.
//!
//! Pure. A client's body is never re-serialised: it is scanned once, strictly, and only the fields that a leg needs are
//! spliced; all other bytes reach the engine unchanged. Transfer parameters are forwarded whole and once, and are never
//! accepted from a client.

mod answer;
pub mod items;
mod json;
mod json_string;
mod kv;
mod replay_verifier;
mod replication;
mod request;
mod reverse_pull;
mod splice;
mod sse;
mod token_transcript;

pub use answer::{AnswerParseError, AnswerSummary, HandoffParams, TokenUsage, usage_at_end};
pub use json::JsonError;
pub use json_string::JsonString;
pub use kv::{ConnectorUnavailable, KvConnector, KvTransfer, LegOrder, ReturnsKv, TransferEndpoint, TransferHandshake};
pub use replay_verifier::{AnswerDeterminism, ReplayVerifier};
pub use replication::{PATH as REPLICATE_PATH, ReplicationRequest, source_leg, target_leg};
pub use request::{
    AnswerContinuation, AnswerTokenIdsMode, Api, ClientRequestBody, LegOptions, StrippedFieldCounts, UsageEventMode,
};
pub use reverse_pull::{ReversePullParams, answer_token_ids, redact_answer};
pub use splice::{BodyGrowth, JsonSplice, LegBody, ScannedJson};
pub use sse::{EventBufferBudget, EventBufferShare, EventRefusal, SseFilter, StreamFacts};
pub use token_transcript::{ContinuationBlocker, ResumableTokenIds, TextTiming, TokenTranscript};

/// Whether the client sees token ids.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ClientTokenIdVisibility {
    /// The client requested them.
    All,
    /// Only the router requested them.
    None,
}

/// Whether usage events are forwarded to the client.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum ClientUsageVisibility {
    #[default]
    Shown,
    Hidden,
}
