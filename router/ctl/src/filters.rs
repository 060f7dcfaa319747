//! Filters of each list. Only filters that the API supports are offered.

use clap::{Args, ValueEnum};
use vocabulary::{ArtifactGroupId, ArtifactId, SessionId};

use super::args::{ModeArg, WorkerArg};

/// Filters of a list, as query parameters.
pub(crate) trait ListFilter: Args {
    fn query_pairs(&self) -> Vec<(&'static str, String)>;
}

impl ListFilter for () {
    fn query_pairs(&self) -> Vec<(&'static str, String)> {
        Vec::new()
    }
}

/// Who holds an artifact.
#[derive(Clone, Copy, Debug, ValueEnum)]
#[value(rename_all = "snake_case")]
pub(crate) enum OwnershipStateArg {
    /// A live worker owns it.
    Owned,
    /// Only replicas hold it.
    ReplicaOnly,
    /// Only a store holds it.
    StoreOnly,
    /// No worker holds it.
    Unowned,
}

impl std::fmt::Display for OwnershipStateArg {
    /// Writes the API's word.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Owned => "owned",
            Self::ReplicaOnly => "replica_only",
            Self::StoreOnly => "store_only",
            Self::Unowned => "unowned",
        })
    }
}

macro_rules! filter {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty => $query:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Debug, Args)]
        pub(crate) struct $name {
            $($(#[$field_doc])* #[arg(long)] $field: Option<$type>,)+
        }

        impl ListFilter for $name {
            fn query_pairs(&self) -> Vec<(&'static str, String)> {
                let all = [$(self.$field.as_ref().map(|value| ($query, value.to_string()))),+];
                all.into_iter().flatten().collect()
            }
        }
    };
}

filter! {
    /// Of sessions.
    SessionFilterArgs {
        /// Of this tenant.
        tenant: String => "tenant",
        /// With this model.
        model: String => "model",
        /// The client's key of the session; needs --model, and --tenant unless that is default.
        session_key: String => "session_key",
        /// Decoded by this worker, by id or URL.
        worker: WorkerArg => "worker",
        /// Forked from this session.
        parent: SessionId => "parent",
    }
}
filter! {
    /// Of artifacts, and of who owns their ends.
    ArtifactFilterArgs {
        /// Of this tenant.
        tenant: String => "tenant",
        /// Of this model's KV.
        model: String => "model",
        /// Owned by this worker, by id or URL.
        worker: WorkerArg => "worker",
        /// In this group.
        group: ArtifactGroupId => "group",
        /// With a head of this session in it.
        session: SessionId => "session",
        /// Who holds it now.
        state: OwnershipStateArg => "state",
    }
}
filter! {
    /// Of read-only copies.
    ReplicaFilterArgs {
        /// At this worker, by id or URL.
        worker: WorkerArg => "worker",
        /// Of this artifact.
        artifact: ArtifactId => "artifact",
    }
}
filter! {
    /// Of leases.
    LeaseFilterArgs {
        /// How it stands.
        #[arg(value_parser = ["held", "expired", "retired"])]
        state: String => "state",
    }
}
filter! {
    /// Of steps in flight.
    IntentFilterArgs {
        /// Of this session.
        session: SessionId => "session",
        /// Sent to this worker, by id or URL.
        worker: WorkerArg => "worker",
        /// Sent by the router of this node.
        router: u64 => "router",
    }
}
filter! {
    /// Of workers.
    WorkerFilterArgs {
        /// What it does.
        #[arg(value_parser = ["prefill", "decode", "hybrid"])]
        role: String => "role",
        /// Whether it takes work; who is ejected is ready.
        #[arg(value_parser = ["ready", "draining", "unreachable"])]
        state: String => "health",
    }
}
filter! {
    /// Of tenants.
    TenantFilterArgs {
        /// Only those with a quota (true), or without one (false).
        has_quota: bool => "has_quota",
    }
}
filter! {
    /// Of decisions; the words are those of the receipts.
    DecisionFilterArgs {
        /// Of this session.
        session: SessionId => "session",
        /// Of this tenant.
        tenant: String => "tenant",
        /// For this model.
        model: String => "model",
        /// Decided in this mode.
        mode: ModeArg => "mode",
        /// Of this kind of step, as small_increment.
        step_kind: String => "step_kind",
        /// Served by this action, as artifact_fetch.
        action: String => "action",
        /// With this worker in a leg, by id or URL.
        worker: WorkerArg => "worker",
        /// With this outcome, as complete or interrupted.
        outcome: String => "outcome",
    }
}
