//! Engines' dialects: bodies of a plan's legs made from the client's bytes, and engines' answers read.
//!
//! Pure. A client's body is never re-serialised: it is scanned once, strictly, and only the fields that a leg needs
//! are spliced; everything else reaches the engine byte for byte. Transfer parameters are handed over whole, once, and
//! never come from a client.

mod answer;
pub mod items;
mod json;
mod kv;
mod readback;
mod replicate;
mod request;
mod retold;
mod said;
mod splice;
mod sse;

pub use answer::{Answer, AnswerError, Handoff, Usage, usage_at_end};
pub use json::JsonError;
pub use kv::{HandsBack, Meeting, Order, Place, Spoken, Transfer, Unmet};
pub use readback::{Readback, for_client, said_ids};
pub use replicate::{PATH as REPLICATE_PATH, Replica, replicate_decode, replicate_prefill};
pub use request::{Api, GoOn, LegOptions, RequestBody, Stripped, TokenIds, UsageEvent};
pub use retold::{Repeats, Retold};
pub use said::{Kept, Lost, Said, ShownIds, Telling};
pub use splice::{JsonFields, Splice};
pub use sse::{EventBudget, SseScanner, StreamFacts};
