//! Commands on what the ledger and the routers hold: owners, leases, sessions, artifacts, replicas, intents, groups,
//! tenants and workers. Each is a noun with verbs; `list` and `get` are the same everywhere.

use clap::{Args, Subcommand};
use serde_json::json;
use vocabulary::{ArtifactGroupId, ArtifactId, PrefixId, SessionId, TimeSpan, flags};

use super::args::{EpochArg, OwnershipSubjectArg};
use super::client::OperatorClient;
use super::drain;
use super::error::CtlError;
use super::filters::{
    ArtifactFilterArgs, IntentFilterArgs, LeaseFilterArgs, ListFilter, ReplicaFilterArgs, SessionFilterArgs,
    TenantFilterArgs, WorkerFilterArgs,
};
use super::lists::{self, ConsistencyArgs, ListSpec, PageArgs, escaped, show_one, show_tree};
use super::output::OutputFormat;
use super::purge;
use super::writes::{
    self, ArtifactOperand, QuotaArg, TargetWorkerArgs, WorkerOperand, WriteRequest, delete, post, put,
};

// Comments of types that are flattened into a command are not doc comments: those would be the help of the command.

// Filters and page of a list.
#[derive(Clone, Debug, Args)]
pub(crate) struct ListArgs<F: Args> {
    #[command(flatten)]
    filter: F,
    #[command(flatten)]
    page: PageArgs,
}

// A list without filters.
#[derive(Clone, Debug, Args)]
pub(crate) struct UnfilteredListArgs {
    #[command(flatten)]
    page: PageArgs,
}

impl<F: ListFilter> ListArgs<F> {
    async fn show(&self, (client, list): (&OperatorClient, &ListSpec), output: OutputFormat) -> Result<(), CtlError> {
        list.show(client, (&self.filter, &self.page), output).await
    }
}

/// Owners of sealed prefixes.
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum OwnerCommand {
    /// Lists sealed prefixes and their owners.
    List(ListArgs<ArtifactFilterArgs>),
    /// Shows the owner of one prefix.
    Get {
        /// The prefix.
        prefix: PrefixId,
        #[command(flatten)]
        consistency: ConsistencyArgs,
    },
    /// Gives a session or an artifact without a live owner to a worker.
    Claim {
        /// The session or the artifact.
        subject: OwnershipSubjectArg,
        #[command(flatten)]
        target: TargetWorkerArgs,
    },
    /// Takes a session or an artifact from its owner, without giving it to another worker.
    Release {
        /// The session or the artifact.
        subject: OwnershipSubjectArg,
        /// Only if it was granted at this epoch; when left out, the epoch that the command reads first.
        #[arg(long)]
        epoch: Option<EpochArg>,
    },
}

impl OwnerCommand {
    pub(crate) async fn run(&self, client: &OperatorClient, output: OutputFormat) -> Result<(), CtlError> {
        let request = match self {
            Self::List(list) => return list.show((client, &lists::OWNERS), output).await,
            Self::Get { prefix, consistency } => {
                return show_one(client, (&format!("owners/{prefix}"), consistency), ("owners", output)).await;
            }
            Self::Claim { subject, target } => post(format!("{subject}/claim"), json!({"owner": target.json()})),
            Self::Release { subject, epoch } => {
                post(format!("{subject}/release"), json!({})).with_fence(*epoch, subject.to_string())
            }
        };
        writes::run(client, request, output).await
    }
}

/// Leases: the lives of workers as the ledger holds them.
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum LeaseCommand {
    /// Lists leases.
    List(ListArgs<LeaseFilterArgs>),
    /// Shows the lease of one worker.
    Get {
        #[command(flatten)]
        worker: WorkerOperand,
        #[command(flatten)]
        consistency: ConsistencyArgs,
    },
    /// Renews the lease of a worker's present incarnation by one term.
    Renew(WorkerOperand),
}

impl LeaseCommand {
    pub(crate) async fn run(&self, client: &OperatorClient, output: OutputFormat) -> Result<(), CtlError> {
        match self {
            Self::List(list) => list.show((client, &lists::LEASES), output).await,
            Self::Get { worker: WorkerOperand { worker }, consistency } => {
                show_one(client, (&format!("leases/{worker}"), consistency), ("lease", output)).await
            }
            Self::Renew(WorkerOperand { worker }) => {
                writes::run(client, post(format!("leases/{worker}/renew"), json!({})), output).await
            }
        }
    }
}

/// Sessions: conversations of clients.
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum SessionCommand {
    /// Lists sessions.
    List(ListArgs<SessionFilterArgs>),
    /// Shows one session.
    Get {
        /// The session.
        session: SessionId,
        #[command(flatten)]
        consistency: ConsistencyArgs,
    },
    /// Shows the fork tree of a session.
    Tree {
        /// The session.
        session: SessionId,
    },
    /// Moves a session, with its blocks, to another worker.
    Migrate {
        /// The session.
        session: SessionId,
        #[command(flatten)]
        target: TargetWorkerArgs,
        /// Only records the move; for blocks that are at the target already.
        #[arg(long)]
        record_only: bool,
        /// Only if it was granted at this epoch; when left out, the epoch that the command reads first.
        #[arg(long)]
        epoch: Option<EpochArg>,
    },
    /// Removes a session from the ledger.
    Close {
        /// The session.
        session: SessionId,
    },
    /// Erases stored responses and token checkpoints of a session, at every endpoint.
    Purge {
        /// The session.
        session: SessionId,
        /// Its tenant, where the ledger does not know the session any more.
        #[arg(long, value_name = "NAME")]
        tenant: Option<String>,
    },
}

impl SessionCommand {
    /// Returns whether it takes as long as a transfer of blocks between workers.
    pub(crate) fn moves_blocks(&self) -> bool {
        matches!(self, Self::Migrate { .. })
    }

    pub(crate) fn is_purge(&self) -> bool {
        matches!(self, Self::Purge { .. })
    }

    pub(crate) async fn run(&self, client: &OperatorClient, output: OutputFormat) -> Result<(), CtlError> {
        let request = match self {
            Self::List(list) => return list.show((client, &lists::SESSIONS), output).await,
            Self::Get { session, consistency } => {
                return show_one(client, (&format!("sessions/{session}"), consistency), ("session", output)).await;
            }
            Self::Tree { session } => return show_tree(client, *session, output).await,
            Self::Migrate { session, target, record_only, epoch } => {
                let body = json!({"target": target.json(), "record_only": record_only});
                post(format!("sessions/{session}/migrate"), body).with_fence(*epoch, format!("sessions/{session}"))
            }
            Self::Close { session } => delete(format!("sessions/{session}")),
            Self::Purge { session, tenant } => {
                return purge::session(client, (*session, tenant.as_deref()), output).await;
            }
        };
        writes::run(client, request, output).await
    }
}

/// Artifacts: sealed ranges of blocks.
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum ArtifactCommand {
    /// Lists artifacts.
    List(ListArgs<ArtifactFilterArgs>),
    /// Shows one artifact.
    Get {
        #[command(flatten)]
        artifact: ArtifactOperand,
        #[command(flatten)]
        consistency: ConsistencyArgs,
    },
    /// Keeps an artifact from being evicted or collected.
    Pin(ArtifactOperand),
    /// Takes the pin of an artifact back.
    Unpin(ArtifactOperand),
    /// Removes an artifact that nothing references from the ledger.
    Evict(ArtifactOperand),
}

impl ArtifactCommand {
    pub(crate) async fn run(&self, client: &OperatorClient, output: OutputFormat) -> Result<(), CtlError> {
        let affinity_key =
            |artifact: ArtifactId, pinned: bool| put(format!("artifacts/{artifact}/pin"), json!({"pinned": pinned}));
        let request = match self {
            Self::List(list) => return list.show((client, &lists::ARTIFACTS), output).await,
            Self::Get { artifact: ArtifactOperand { artifact }, consistency } => {
                return show_one(client, (&format!("artifacts/{artifact}"), consistency), ("artifact", output)).await;
            }
            Self::Pin(ArtifactOperand { artifact }) => affinity_key(*artifact, true),
            Self::Unpin(ArtifactOperand { artifact }) => affinity_key(*artifact, false),
            Self::Evict(ArtifactOperand { artifact }) => delete(format!("artifacts/{artifact}")),
        };
        writes::run(client, request, output).await
    }
}

/// Longest time that a replica is trusted.
const MAX_REPLICA_TTL: TimeSpan = TimeSpan::seconds(86_400);

/// Replicas: read-only copies of artifacts.
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum ReplicaCommand {
    /// Lists replicas.
    List(ListArgs<ReplicaFilterArgs>),
    /// Copies an artifact, with its prefix, to a worker.
    Create {
        #[command(flatten)]
        artifact: ArtifactOperand,
        #[command(flatten)]
        target: TargetWorkerArgs,
        /// Only records the replica; for blocks that are at the target already.
        #[arg(long)]
        record_only: bool,
        /// How long the replica is trusted, as 10m.
        #[arg(long, value_name = "DURATION", default_value = "10m",
            value_parser = |text: &str| flags::duration_within(text, TimeSpan::seconds(1)..=MAX_REPLICA_TTL))]
        ttl: TimeSpan,
    },
    /// Removes a worker's replica of an artifact from the ledger.
    Delete {
        #[command(flatten)]
        artifact: ArtifactOperand,
        #[command(flatten)]
        worker: WorkerOperand,
    },
}

impl ReplicaCommand {
    /// Returns whether it takes as long as a transfer of blocks between workers.
    pub(crate) fn moves_blocks(&self) -> bool {
        matches!(self, Self::Create { .. })
    }

    pub(crate) async fn run(&self, client: &OperatorClient, output: OutputFormat) -> Result<(), CtlError> {
        let request = match self {
            Self::List(list) => return list.show((client, &lists::REPLICAS), output).await,
            Self::Create { artifact: ArtifactOperand { artifact }, target, record_only, ttl } => {
                let body = json!({"target": target.json(), "record_only": record_only, "ttl": ttl});
                post(format!("artifacts/{artifact}/replicas"), body)
            }
            Self::Delete { artifact: ArtifactOperand { artifact }, worker: WorkerOperand { worker } } => {
                delete(format!("artifacts/{artifact}/replicas/{worker}"))
            }
        };
        writes::run(client, request, output).await
    }
}

/// Intents: steps in flight.
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum IntentCommand {
    /// Lists intents.
    List(ListArgs<IntentFilterArgs>),
}

impl IntentCommand {
    pub(crate) async fn run(&self, client: &OperatorClient, output: OutputFormat) -> Result<(), CtlError> {
        let Self::List(list) = self;
        list.show((client, &lists::INTENTS), output).await
    }
}

/// Groups of artifacts.
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum GroupCommand {
    /// Lists groups.
    List(UnfilteredListArgs),
    /// Creates a group, assigns these artifacts to it, and prints its id.
    Create {
        /// The artifacts; a group without any is listed once `group assign` has added one.
        artifacts: Vec<ArtifactId>,
    },
    /// Assigns an artifact to a group.
    Assign {
        #[command(flatten)]
        artifact: ArtifactOperand,
        /// The group.
        group: ArtifactGroupId,
    },
    /// Takes an artifact out of its group.
    Unassign(ArtifactOperand),
}

impl GroupCommand {
    pub(crate) async fn run(&self, client: &OperatorClient, output: OutputFormat) -> Result<(), CtlError> {
        let assign = |artifact: ArtifactId, group: Option<ArtifactGroupId>| {
            put(format!("artifacts/{artifact}/group"), json!({"group": group.map(|group| group.to_string())}))
        };
        let request = match self {
            Self::List(list) => return lists::GROUPS.show(client, (&(), &list.page), output).await,
            Self::Create { artifacts } => {
                let artifacts: Vec<String> = artifacts.iter().map(ArtifactId::to_string).collect();
                post("groups", json!({"artifacts": artifacts}))
            }
            Self::Assign { artifact: ArtifactOperand { artifact }, group } => assign(*artifact, Some(*group)),
            Self::Unassign(ArtifactOperand { artifact }) => assign(*artifact, None),
        };
        writes::run(client, request, output).await
    }
}

/// Tenants and their quotas.
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum TenantCommand {
    /// Lists tenants, what they have and what they may have.
    List(ListArgs<TenantFilterArgs>),
    /// Sets how many artifacts and sessions a tenant may have.
    SetQuota {
        /// The tenant.
        tenant: String,
        /// The number of artifacts and sessions; `none` removes the quota.
        quota: QuotaArg,
    },
    /// Erases stored responses and token checkpoints of all sessions of a tenant, at every endpoint.
    Purge {
        /// The tenant.
        tenant: String,
    },
}

impl TenantCommand {
    pub(crate) fn is_purge(&self) -> bool {
        matches!(self, Self::Purge { .. })
    }

    pub(crate) async fn run(&self, client: &OperatorClient, output: OutputFormat) -> Result<(), CtlError> {
        match self {
            Self::List(list) => list.show((client, &lists::TENANTS), output).await,
            Self::SetQuota { tenant, quota } => {
                let request = put(format!("tenants/{}/quota", escaped(tenant)), json!({"max_entries": quota.0}));
                writes::run(client, request, output).await
            }
            Self::Purge { tenant } => purge::tenant(client, tenant, output).await,
        }
    }
}

/// Workers as routers see them.
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum WorkerCommand {
    /// Lists workers.
    List(ListArgs<WorkerFilterArgs>),
    /// Shows one worker.
    Get {
        #[command(flatten)]
        worker: WorkerOperand,
        #[command(flatten)]
        consistency: ConsistencyArgs,
    },
    Drain(drain::DrainArgs),
    /// Takes a worker back into service.
    Undrain(WorkerOperand),
    /// Registers a worker at this router for a time; a registration that is repeated within this time goes on.
    Register {
        /// Its URL, followed by #prefill or #decode if it is not a hybrid.
        url: String,
        /// How long the registration holds, as 30s or 5m.
        #[arg(long, value_name = "DURATION", value_parser = flags::duration)]
        ttl: Option<TimeSpan>,
        /// A model that it serves; may be repeated. When left out, the worker is asked.
        #[arg(long = "model")]
        models: Vec<String>,
    },
    /// Ends a registration; requests at the worker run to their end.
    Deregister(WorkerOperand),
    /// Ends the ownership of a worker that is gone for good, before its lease expires.
    Retire(WorkerOperand),
}

impl WorkerCommand {
    pub(crate) async fn run(&self, client: &OperatorClient, output: OutputFormat) -> Result<(), CtlError> {
        let request = match self {
            Self::List(list) => return list.show((client, &lists::WORKERS), output).await,
            Self::Get { worker: WorkerOperand { worker }, consistency } => {
                return show_one(client, (&format!("workers/{worker}"), consistency), ("worker", output)).await;
            }
            Self::Drain(args) => return drain::drain(client, args, output).await,
            Self::Undrain(WorkerOperand { worker }) => {
                put(format!("workers/{worker}/drain"), json!({"draining": false}))
            }
            Self::Register { url, ttl, models } => registration(url, *ttl, models),
            Self::Deregister(WorkerOperand { worker }) => delete(format!("registrations/{worker}")),
            Self::Retire(WorkerOperand { worker }) => delete(format!("workers/{worker}")),
        };
        writes::run(client, request, output).await
    }
}

fn registration(url: &str, ttl: Option<TimeSpan>, models: &[String]) -> WriteRequest {
    let mut body = json!({"url": url, "models": models});
    if let Some(ttl) = ttl {
        body["ttl"] = json!(ttl);
    }
    post("registrations", body)
}
