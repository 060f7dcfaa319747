//! Commands that change something: each one request, fenced by what was read where the API asks for it.

use clap::Subcommand;
use http::Method;
use serde_json::{Value, json};
use vocabulary::{ArtifactId, GroupId, SessionId};

use super::args::{EpochArg, SubjectArg, WorkerArg};
use super::client::Client;
use super::error::CtlError;
use super::lists::{escaped, pretty};
use super::output::{Output, say};
use super::table::word;

/// What can be changed.
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum WriteCommand {
    /// Gives a session or an artifact that nobody live owns to a worker.
    Claim {
        /// The session or the artifact.
        subject: SubjectArg,
        /// The worker, by id or URL.
        #[arg(long)]
        to: WorkerArg,
        /// Which data-parallel rank of it.
        #[arg(long, default_value_t = 0)]
        rank: u16,
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
        /// The worker, by id or URL.
        #[arg(long)]
        to: WorkerArg,
        /// Which data-parallel rank of it.
        #[arg(long, default_value_t = 0)]
        rank: u16,
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
        /// The worker, by id or URL.
        #[arg(long)]
        to: WorkerArg,
        /// Which data-parallel rank of it.
        #[arg(long, default_value_t = 0)]
        rank: u16,
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
    Pin {
        /// The artifact.
        artifact: ArtifactId,
    },
    /// Takes a pin back.
    Unpin {
        /// The artifact.
        artifact: ArtifactId,
    },
    /// Forgets an artifact that nothing references.
    Evict {
        /// The artifact.
        artifact: ArtifactId,
    },
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
    Renew {
        /// The worker, by id or URL.
        worker: WorkerArg,
    },
}

/// A bound, or none.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QuotaArg(Option<u64>);

impl std::str::FromStr for QuotaArg {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "none" { Ok(Self(None)) } else { text.parse().map(|most| Self(Some(most))) }
    }
}

/// A request that changes something.
pub(crate) struct Request {
    pub(crate) method: Method,
    pub(crate) path: String,
    pub(crate) body: Value,
    pub(crate) fence: FenceFrom,
}

/// Where the fence comes from.
pub(crate) enum FenceFrom {
    /// None is needed.
    Nowhere,
    /// This epoch.
    Given(EpochArg),
    /// What a read of this path says now.
    Read(String),
}

fn fence(epoch: Option<EpochArg>, path: String) -> FenceFrom {
    epoch.map_or(FenceFrom::Read(path), FenceFrom::Given)
}

fn target(worker: WorkerArg, rank: u16) -> Value {
    json!({"worker": worker.to_string(), "rank": rank})
}

fn blocks(there: &bool) -> &'static str {
    if *there { "there" } else { "move" }
}

impl WriteCommand {
    /// Whether it takes as long as blocks need from one worker to another.
    pub(crate) fn moves_blocks(&self) -> bool {
        matches!(self, Self::Migrate { .. } | Self::Replicate { .. })
    }

    pub(crate) fn request(&self) -> Request {
        let free =
            |method: Method, path: String, body: Value| Request { method, path, body, fence: FenceFrom::Nowhere };
        match self {
            Self::Claim { subject, to, rank } => {
                free(Method::POST, format!("{subject}/claim"), json!({"owner": target(*to, *rank)}))
            }
            Self::Release { subject, epoch } => Request {
                fence: fence(*epoch, subject.to_string()),
                ..free(Method::POST, format!("{subject}/release"), json!({}))
            },
            Self::Migrate { session, to, rank, there, epoch } => Request {
                fence: fence(*epoch, format!("sessions/{session}")),
                ..free(
                    Method::POST,
                    format!("sessions/{session}/migrate"),
                    json!({"to": target(*to, *rank), "blocks": blocks(there)}),
                )
            },
            Self::Replicate { artifact, to, rank, there, ttl } => free(
                Method::POST,
                format!("artifacts/{artifact}/replicas"),
                json!({"holder": target(*to, *rank), "blocks": blocks(there), "ttl_ms": ttl * 1000}),
            ),
            Self::DropReplica { artifact, worker } => {
                free(Method::DELETE, format!("artifacts/{artifact}/replicas/{worker}"), json!({}))
            }
            Self::Pin { artifact } => free(Method::PUT, format!("artifacts/{artifact}/pin"), json!({"pinned": true})),
            Self::Unpin { artifact } => {
                free(Method::PUT, format!("artifacts/{artifact}/pin"), json!({"pinned": false}))
            }
            Self::Evict { artifact } => free(Method::DELETE, format!("artifacts/{artifact}"), json!({})),
            Self::Group { artifact, group } => free(
                Method::PUT,
                format!("artifacts/{artifact}/group"),
                json!({"group": group.map(|group| group.to_string())}),
            ),
            Self::Close { session } => free(Method::DELETE, format!("sessions/{session}"), json!({})),
            Self::Quota { tenant, artifacts } => {
                free(Method::PUT, format!("tenants/{}/quota", escaped(tenant)), json!({"artifacts": artifacts.0}))
            }
            Self::Renew { worker } => free(Method::POST, format!("leases/{worker}/renew"), json!({})),
        }
    }
}

/// A new group of these artifacts.
pub(crate) fn new_group(artifacts: &[ArtifactId]) -> Request {
    let artifacts: Vec<String> = artifacts.iter().map(ArtifactId::to_string).collect();
    Request {
        method: Method::POST,
        path: "groups".into(),
        body: json!({"artifacts": artifacts}),
        fence: FenceFrom::Nowhere,
    }
}

/// Sends it and prints what was done.
pub(crate) async fn run(client: &Client, request: Request, output: Output) -> Result<(), CtlError> {
    let tag = match &request.fence {
        FenceFrom::Nowhere => None,
        FenceFrom::Given(epoch) => Some(format!("\"{}\"", epoch.0)),
        FenceFrom::Read(path) => client.get(path).await?.tag,
    };
    let got = client.write((request.method, &request.path), &request.body, tag.as_deref()).await?;
    match output {
        Output::Json => say(&format!("{}\n", pretty(&got.json))),
        Output::Table => {
            if let Some(group) = got.json["group"].as_str() {
                say(&format!("{group}\n"));
                output.note(&word(got.json.get("did")));
                return Ok(());
            }
            say(&format!("{}\n", word(got.json.get("did"))));
            let moved = &got.json["moved"];
            if moved.is_object() {
                say(&format!(
                    "moved {} blocks, {} bytes in {} ms\n",
                    moved["blocks"], moved["bytes"], moved["took_ms"]
                ));
            }
        }
    }
    Ok(())
}
