//! JSON schemas of the ledger's values, for the OpenAPI document.

use std::borrow::Cow;

use ownership::LedgerView;
use serde::Serialize;
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{ObjectBuilder, Schema, Type};
use utoipa::{PartialSchema, ToSchema};
use vocabulary::{DpRank, Incarnation, LedgerTime, Micros, Owner, WorkerId};

use super::request_units::ByteSizeInput;
use vocabulary::{TimeSpan, UtcTime};

/// Defines the schema of a string with a fixed format.
macro_rules! text_word {
    ($word:ident, $name:literal, $pattern:literal, $example:literal, $description:literal) => {
        #[doc = $description]
        pub(super) struct $word;

        impl PartialSchema for $word {
            fn schema() -> RefOr<Schema> {
                ObjectBuilder::new()
                    .schema_type(Type::String)
                    .pattern(Some($pattern))
                    .examples([serde_json::json!($example)])
                    .description(Some($description))
                    .into()
            }
        }

        impl ToSchema for $word {
            fn name() -> Cow<'static, str> {
                $name.into()
            }
        }
    };
}

text_word!(
    SessionIdSchema,
    "SessionId",
    "^s-[0-9a-fA-F]{32}$",
    "s-0000000000000000000000000000002a",
    "A session's id."
);
text_word!(
    ArtifactIdSchema,
    "ArtifactId",
    "^a-[0-9a-fA-F]{32}$",
    "a-0000000000000000000000000000002a",
    "An artifact's id."
);
text_word!(PrefixIdSchema, "PrefixId", "^p-[0-9a-fA-F]{32}$", "p-0000000000000000000000000000002a", "A prefix's id.");
text_word!(
    GroupIdSchema,
    "ArtifactGroupId",
    "^g-[0-9a-fA-F]{32}$",
    "g-0000000000000000000000000000002a",
    "A group's id."
);
text_word!(WorkerIdSchema, "WorkerId", "^w-[0-9a-fA-F]{16}$", "w-000000000000002a", "A worker's id.");
text_word!(
    RequestIdSchema,
    "RequestId",
    "^req-[0-9a-fA-F]{32}$",
    "req-0000000000000000000000000000002a",
    "A request's id, as in `x-request-id`."
);

/// A tenant's name, as in the file of API keys.
pub(super) struct TenantIdSchema;

/// Maximum length of a tenant's name in characters.
pub(super) const MAX_TENANT_CHARS: usize = 128;

impl PartialSchema for TenantIdSchema {
    fn schema() -> RefOr<Schema> {
        ObjectBuilder::new()
            .schema_type(Type::String)
            .min_length(Some(1))
            .max_length(Some(MAX_TENANT_CHARS))
            .examples([serde_json::json!("default")])
            .description(Some("A tenant's name, as in the file of API keys."))
            .into()
    }
}

impl ToSchema for TenantIdSchema {
    fn name() -> Cow<'static, str> {
        "TenantId".into()
    }
}

/// Returns a schema under its name.
pub(super) fn named_schema<T: ToSchema>() -> (String, RefOr<Schema>) {
    (T::name().into_owned(), T::schema())
}

/// Schemas used in paths and queries, which utoipa does not collect by itself.
pub(super) fn parameter_schemas() -> Vec<(String, RefOr<Schema>)> {
    vec![
        named_schema::<SessionIdSchema>(),
        named_schema::<ArtifactIdSchema>(),
        named_schema::<PrefixIdSchema>(),
        named_schema::<GroupIdSchema>(),
        named_schema::<WorkerIdSchema>(),
        named_schema::<RequestIdSchema>(),
        named_schema::<TenantIdSchema>(),
        named_schema::<TimeSpan>(),
        named_schema::<ByteSizeInput>(),
        named_schema::<UtcTime>(),
    ]
}

/// Time from `from` to `to` on the ledger's clock in whole milliseconds; zero where `to` has passed.
pub(super) fn ledger_span(from: LedgerTime, to: LedgerTime) -> TimeSpan {
    TimeSpan::whole_millis(Micros(to.0.saturating_sub(from.0)).duration())
}

/// A fencing token. It only grows, over restarts, snapshots and restores.
#[derive(ToSchema)]
#[schema(as = Epoch)]
#[expect(dead_code, reason = "describes how vocabulary::Epoch is written; the document is made from its fields")]
pub(super) struct EpochSchema {
    /// Restores from a backup so far.
    generation: u32,
    /// Log index of the entry that granted it.
    index: u64,
    /// Position of the command inside that entry.
    position: u32,
}

/// One rank of one incarnation of a worker.
#[derive(ToSchema)]
#[schema(as = Owner)]
#[expect(dead_code, reason = "describes how vocabulary::Owner is written; the document is made from its fields")]
pub(super) struct OwnerSchema {
    /// The worker.
    #[schema(value_type = WorkerIdSchema)]
    worker: String,
    /// Incarnation of the worker.
    incarnation: u64,
    /// Data-parallel rank.
    rank: u16,
}

/// Role of a worker.
#[derive(ToSchema)]
#[schema(rename_all = "lowercase")]
#[expect(dead_code, reason = "describes how vocabulary::WorkerRole is written")]
pub(super) enum WorkerRoleSchema {
    Prefill,
    Decode,
    Hybrid,
}

/// Whether a worker takes work.
#[derive(ToSchema)]
#[schema(rename_all = "lowercase")]
#[expect(dead_code, reason = "describes how vocabulary::WorkerHealth is written")]
pub(super) enum HealthSchema {
    Unreachable,
    Ready,
    Draining,
}

/// How reliable the index of a worker's blocks is.
#[derive(ToSchema)]
#[schema(as = KvIndexState, rename_all = "lowercase")]
#[expect(dead_code, reason = "describes how vocabulary::KvIndexState is written")]
pub(super) enum KvIndexStateSchema {
    /// Inferred from what was routed there.
    Approximate,
    /// KV events were lost and the index is not resynchronized.
    Degraded,
    /// Every KV event was received.
    Exact,
}

/// An owner, and whether its lease is held.
#[derive(Clone, Serialize, ToSchema)]
pub(super) struct OwnerResource {
    /// The worker.
    #[schema(value_type = WorkerIdSchema)]
    worker: WorkerId,
    /// Its base URL; null when the ledger has forgotten it.
    endpoint: Option<std::sync::Arc<str>>,
    /// Incarnation of the worker.
    #[schema(value_type = u64)]
    incarnation: Incarnation,
    /// Data-parallel rank.
    #[schema(value_type = u16)]
    rank: DpRank,
    /// Whether the lease of that incarnation is held.
    live: bool,
}

impl OwnerResource {
    pub(super) fn new(view: &LedgerView, owner: Owner) -> Self {
        let Owner { worker, incarnation, rank } = owner;
        let endpoint = view.worker(worker).map(|record| record.spec.endpoint.clone());
        Self { worker, endpoint, incarnation, rank, live: view.is_live(owner) }
    }
}
