//! Write commands: one request each, fenced by what was read where the API requires it.

use clap::{Args, Subcommand};
use http::Method;
use serde_json::{Value, json};
use vocabulary::{ArtifactId, GroupId, SessionId};

use super::args::{EpochArg, SubjectArg, WorkerArg};
use super::client::OperatorClient;
use super::error::CtlError;
use super::lists::escaped;
use super::output::OutputFormat;
use super::table::cell_text;

/// What can be changed.
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum WriteCommand {
    /// Gives a session or an artifact that nobody live owns to a worker.
    Claim {
        /// The session or the artifact.
        subject: SubjectArg,
        #[command(flatten)]
        to: OwnerArgs,
    },
    /// Takes a session or an artifact from its owner, without giving it to another.
    Release {
        /// The session or the artifact.
        subject: SubjectArg,
        /// Only if it was granted at this epoch; otherwise whatever is there when the command reads it.
        #[arg(long)]
        epoch: Option<EpochArg>,
    },
    /// Moves a session, with its blocks, to another worker.
    Migrate {
        /// The session.
        session: SessionId,
        #[command(flatten)]
        to: OwnerArgs,
        /// The blocks are there already: only record it.
        #[arg(long)]
        there: bool,
        /// Only if it was granted at this epoch; otherwise whatever is there when the command reads it.
        #[arg(long)]
        epoch: Option<EpochArg>,
    },
    /// Copies an artifact, with the prefix it hangs on, to a worker.
    Replicate {
        /// The artifact.
        artifact: ArtifactId,
        #[command(flatten)]
        to: OwnerArgs,
        /// The blocks are there already: only record it.
        #[arg(long)]
        there: bool,
        /// How long the copy is believed, in seconds.
        #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u32).range(1..=86_400))]
        ttl: u32,
    },
    /// Forgets a worker's copy of an artifact.
    DropReplica {
        /// The artifact.
        artifact: ArtifactId,
        /// The worker, by id or URL.
        worker: WorkerArg,
    },
    /// Keeps an artifact from being evicted or collected.
    Pin(ArtifactOperand),
    /// Takes a pin back.
    Unpin(ArtifactOperand),
    /// Forgets an artifact that nothing references.
    Evict(ArtifactOperand),
    /// Puts an artifact into a group, or without one out of any.
    Group {
        /// The artifact.
        artifact: ArtifactId,
        /// The group.
        group: Option<GroupId>,
    },
    /// Forgets a session.
    Close {
        /// The session.
        session: SessionId,
    },
    /// Sets how many artifacts and sessions a tenant may have, or lifts it.
    Quota {
        /// The tenant.
        tenant: String,
        /// How many; `none` lifts the bound.
        artifacts: QuotaArg,
    },
    /// Renews the lease of a worker's present life by one term.
    Renew(WorkerOperand),
}

// Not doc comments: as those they would be the help of the whole command.

// Who is to have it.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct OwnerArgs {
    /// The worker, by id or URL.
    #[arg(long)]
    to: WorkerArg,
    /// Which data-parallel rank of it.
    #[arg(long, default_value_t = 0)]
    rank: u16,
}

impl OwnerArgs {
    fn json(self) -> Value {
        json!({"worker": self.to.to_string(), "rank": self.rank})
    }
}

#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct ArtifactOperand {
    /// The artifact.
    artifact: ArtifactId,
}

#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct WorkerOperand {
    /// The worker, by id or URL.
    pub(crate) worker: WorkerArg,
}

/// A limit, or none.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QuotaArg(Option<u64>);

impl std::str::FromStr for QuotaArg {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "none" { Ok(Self(None)) } else { text.parse().map(|most| Self(Some(most))) }
    }
}

/// A write request.
pub(crate) struct WriteRequest {
    pub(crate) method: Method,
    pub(crate) path: String,
    pub(crate) body: Value,
    pub(crate) fence: FenceSource,
}

pub(crate) enum FenceSource {
    /// Needs no fence.
    Unfenced,
    Explicit(EpochArg),
    /// Uses the current tag of the resource at this path.
    FromResource(String),
}

fn unfenced(method: Method, path: impl Into<String>, body: Value) -> WriteRequest {
    WriteRequest { method, path: path.into(), body, fence: FenceSource::Unfenced }
}

pub(crate) fn post(path: impl Into<String>, body: Value) -> WriteRequest {
    unfenced(Method::POST, path, body)
}

pub(crate) fn put(path: impl Into<String>, body: Value) -> WriteRequest {
    unfenced(Method::PUT, path, body)
}

pub(crate) fn delete(path: impl Into<String>) -> WriteRequest {
    unfenced(Method::DELETE, path, json!({}))
}

impl WriteRequest {
    /// Fences the request by this epoch, or else by the current one at `path`.
    fn with_fence(self, epoch: Option<EpochArg>, path: impl Into<String>) -> Self {
        Self { fence: epoch.map_or_else(|| FenceSource::FromResource(path.into()), FenceSource::Explicit), ..self }
    }
}

fn migration_mode(there: bool) -> &'static str {
    if there { "there" } else { "move" }
}

impl WriteCommand {
    /// Returns whether it takes as long as a transfer of blocks between workers.
    pub(crate) fn moves_blocks(&self) -> bool {
        matches!(self, Self::Migrate { .. } | Self::Replicate { .. })
    }

    pub(crate) fn request(&self) -> WriteRequest {
        let pin =
            |artifact: ArtifactId, pinned: bool| put(format!("artifacts/{artifact}/pin"), json!({"pinned": pinned}));
        match self {
            Self::Claim { subject, to } => post(format!("{subject}/claim"), json!({"owner": to.json()})),
            Self::Release { subject, epoch } => {
                post(format!("{subject}/release"), json!({})).with_fence(*epoch, subject.to_string())
            }
            Self::Migrate { session, to, there, epoch } => {
                let body = json!({"to": to.json(), "blocks": migration_mode(*there)});
                post(format!("sessions/{session}/migrate"), body).with_fence(*epoch, format!("sessions/{session}"))
            }
            Self::Replicate { artifact, to, there, ttl } => {
                let body = json!({"holder": to.json(), "blocks": migration_mode(*there), "ttl_ms": ttl * 1000});
                post(format!("artifacts/{artifact}/replicas"), body)
            }
            Self::DropReplica { artifact, worker } => delete(format!("artifacts/{artifact}/replicas/{worker}")),
            Self::Pin(ArtifactOperand { artifact }) => pin(*artifact, true),
            Self::Unpin(ArtifactOperand { artifact }) => pin(*artifact, false),
            Self::Evict(ArtifactOperand { artifact }) => delete(format!("artifacts/{artifact}")),
            Self::Group { artifact, group } => {
                put(format!("artifacts/{artifact}/group"), json!({"group": group.map(|group| group.to_string())}))
            }
            Self::Close { session } => delete(format!("sessions/{session}")),
            Self::Quota { tenant, artifacts } => {
                put(format!("tenants/{}/quota", escaped(tenant)), json!({"artifacts": artifacts.0}))
            }
            Self::Renew(WorkerOperand { worker }) => post(format!("leases/{worker}/renew"), json!({})),
        }
    }
}

pub(crate) fn new_group(artifacts: &[ArtifactId]) -> WriteRequest {
    let artifacts: Vec<String> = artifacts.iter().map(ArtifactId::to_string).collect();
    post("groups", json!({"artifacts": artifacts}))
}

/// Sends the request and prints the result.
pub(crate) async fn run(client: &OperatorClient, request: WriteRequest, output: OutputFormat) -> Result<(), CtlError> {
    let tag = match &request.fence {
        FenceSource::Unfenced => None,
        FenceSource::Explicit(epoch) => Some(format!("\"{}\"", epoch.0)),
        FenceSource::FromResource(path) => client.get(path).await?.tag,
    };
    let got = client.write((request.method, &request.path), &request.body, tag.as_deref()).await?;
    let (did, group, moved) = (cell_text(got.json.get("did")), got.json["group"].as_str(), &got.json["moved"]);
    output.print(&got.json, || match (group, moved.is_object()) {
        (Some(group), _) => format!("{group}\n"),
        (None, false) => format!("{did}\n"),
        (None, true) => {
            format!("{did}\nmoved {} blocks, {} bytes in {} ms\n", moved["blocks"], moved["bytes"], moved["took_ms"])
        }
    });
    if output == OutputFormat::Table && group.is_some() {
        output.note(&did);
    }
    Ok(())
}
