//! `GET /ownerserve/v1/cluster/snapshot`: streams a snapshot of the ledger, for backups.

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use futures::stream;
use http::header::{CONTENT_DISPOSITION, CONTENT_LENGTH, CONTENT_TYPE};
use tokio::io::AsyncReadExt as _;

use super::consistency::REVISION_HEADER;
use super::problem::{Problem, ProblemKind};
use proxy::ledger_access::LedgerAccess;

const CHUNK_BYTES: usize = 64 << 10;

/// Writes a snapshot of this node's ledger and streams it: what `ownerserve ctl snapshot verify` and `restore` read.
///
/// It holds everything: the role operator is needed.
#[utoipa::path(get, path = "/ownerserve/v1/cluster/snapshot", tag = "cluster",
    responses(
        (status = 200, description = "The snapshot, as it lies on disk.", body = Vec<u8>, content_type = "application/octet-stream"),
        (status = 503, description = "No snapshot could be written.")))]
pub(super) async fn save(State(ledger): State<LedgerAccess>) -> Result<Response, Problem> {
    let saved = ledger.directory().save_snapshot().await.map_err(|error| {
        tracing::error!(%error, "a snapshot that an operator asked for was not written");
        Problem::new(ProblemKind::NotReady, "The snapshot was not written; the log of this process says why.")
    })?;
    let name = format!("attachment; filename=\"ownerserve-{}.snapshot\"", saved.applied);
    let headers = [
        (CONTENT_TYPE, "application/octet-stream".to_owned()),
        (CONTENT_LENGTH, saved.bytes.to_string()),
        (CONTENT_DISPOSITION, name),
        (REVISION_HEADER, saved.applied.to_string()),
    ];
    let pieces = stream::try_unfold(tokio::fs::File::from_std(saved.file), |mut file| async move {
        let mut piece = vec![0; CHUNK_BYTES];
        let read = file.read(&mut piece).await?;
        piece.truncate(read);
        Ok::<_, std::io::Error>((read > 0).then(|| (Bytes::from(piece), file)))
    });
    Ok((headers, Body::from_stream(pieces)).into_response())
}
