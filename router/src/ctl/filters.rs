//! Filters of each list. Only filters that the API supports are offered.

use clap::Args;
use vocabulary::{ArtifactId, GroupId, SessionId};

use super::args::WorkerArg;

/// Filters of a list, as query parameters.
pub(crate) trait ListFilter: Args {
    fn query_pairs(&self) -> Vec<(&'static str, String)>;
}

impl ListFilter for () {
    fn query_pairs(&self) -> Vec<(&'static str, String)> {
        Vec::new()
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
        /// What the client calls its session; needs --model.
        key: String => "key",
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
        group: GroupId => "group",
        /// With a head of this session in it.
        session: SessionId => "session",
        /// Who has it now.
        #[arg(value_parser = ["owned", "copied", "stored", "unowned"])]
        state: String => "standing",
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
    /// Of steps on their way.
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
        bounded: bool => "bounded",
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
        #[arg(value_parser = ["own", "shadow", "sticky"])]
        mode: String => "mode",
        /// Of this kind of step, as small_increment.
        step: String => "step",
        /// Served by this action, as artifact_fetch.
        action: String => "action",
        /// With this worker in a leg, by id or URL.
        worker: WorkerArg => "worker",
        /// That ended so, as complete or broken.
        ending: String => "ending",
    }
}
