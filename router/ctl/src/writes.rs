//! Write commands: one request each, fenced by what was read where the API requires it.

use clap::Args;
use http::Method;
use serde_json::{Value, json};
use vocabulary::ArtifactId;

use super::args::{EpochArg, WorkerArg};
use super::client::OperatorClient;
use super::error::CtlError;
use super::output::OutputFormat;
use super::table::cell_text;

// Not doc comments: as those they would be the help of the whole command.

// The worker that gets something.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct TargetWorkerArgs {
    /// The worker that gets it, by id or URL.
    #[arg(long)]
    to: WorkerArg,
    /// The data-parallel rank of the worker.
    #[arg(long, default_value_t = 0)]
    rank: u16,
}

impl TargetWorkerArgs {
    pub(crate) fn json(self) -> Value {
        json!({"worker": self.to.to_string(), "rank": self.rank})
    }
}

#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct ArtifactOperand {
    /// The artifact.
    pub(crate) artifact: ArtifactId,
}

#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct WorkerOperand {
    /// The worker, by id or URL.
    pub(crate) worker: WorkerArg,
}

/// A quota, or none.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QuotaArg(pub(crate) Option<u64>);

/// The text is not a quota.
#[derive(Debug, thiserror::Error)]
#[error("accepted is a whole number, or `none`")]
pub(crate) struct QuotaArgError;

impl std::str::FromStr for QuotaArg {
    type Err = QuotaArgError;

    fn from_str(text: &str) -> Result<Self, QuotaArgError> {
        if text == "none" {
            Ok(Self(None))
        } else {
            text.parse().map(|quota| Self(Some(quota))).map_err(|_| QuotaArgError)
        }
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
    pub(crate) fn with_fence(self, epoch: Option<EpochArg>, path: impl Into<String>) -> Self {
        Self { fence: epoch.map_or_else(|| FenceSource::FromResource(path.into()), FenceSource::Explicit), ..self }
    }
}

/// Sends the request and prints the result.
pub(crate) async fn run(client: &OperatorClient, request: WriteRequest, output: OutputFormat) -> Result<(), CtlError> {
    let tag = match &request.fence {
        FenceSource::Unfenced => None,
        FenceSource::Explicit(epoch) => Some(format!("\"{}\"", epoch.0)),
        FenceSource::FromResource(path) => client.get(path).await?.tag,
    };
    let response = client.write((request.method, &request.path), &request.body, tag.as_deref()).await?;
    let (result, group) = (cell_text(response.json.get("result")), response.json["group"].as_str());
    let transfer = &response.json["transfer"];
    output.print(&response.json, || match (group, transfer.is_object()) {
        (Some(group), _) => format!("{group}\n"),
        (None, false) => format!("{result}\n"),
        (None, true) => {
            let duration = cell_text(transfer.get("duration"));
            format!("{result}\nmoved {} blocks, {} bytes in {duration}\n", transfer["blocks"], transfer["bytes"])
        }
    });
    if output == OutputFormat::Table && group.is_some() {
        output.note(&result);
    }
    Ok(())
}
