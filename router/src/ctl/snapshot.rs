//! `ownerserve ctl snapshot`: snapshots as files.

use std::path::{Path, PathBuf};

use clap::Subcommand;
use http::Method;
use http_body_util::BodyExt as _;
use ownership::{OwnershipError, Restored, SnapshotReport};
use tokio::io::AsyncWriteExt as _;

use super::client::Client;
use super::error::CtlError;
use super::{Output, cluster, writes};

#[derive(Clone, Debug, Subcommand)]
pub(crate) enum SnapshotCommand {
    /// Takes a snapshot of a running node and brings it here, for a backup.
    Save {
        /// Where to; it must not be there yet.
        file: PathBuf,
    },
    /// Lets a running node write a snapshot to its own disk.
    Now,
    /// Reads a snapshot to its last byte, checks it, and says what it holds.
    Verify {
        /// The snapshot.
        file: PathBuf,
    },
    /// Makes a data directory of a new cluster with one node from a snapshot.
    Restore {
        /// The snapshot.
        file: PathBuf,
        /// The new data directory; empty, or not there yet.
        #[arg(long, value_name = "DIR")]
        data_dir: PathBuf,
    },
}

pub(crate) async fn run(client: &Client, command: &SnapshotCommand, output: Output) -> Result<(), CtlError> {
    match command {
        SnapshotCommand::Save { file } => {
            let endpoint = save(client, file).await?;
            let report = verified(file)?;
            output.print(&report, &report_rows(&report));
            output.note(&format!("saved from {endpoint}"));
        }
        SnapshotCommand::Now => {
            let request = cluster::free(Method::POST, "cluster/snapshot", serde_json::json!({}));
            writes::run(client, request, output).await?;
        }
        SnapshotCommand::Verify { file } => {
            let report = verified(file)?;
            output.print(&report, &report_rows(&report));
        }
        SnapshotCommand::Restore { file, data_dir } => {
            let restored = ownership::restore(file, data_dir).await.map_err(|error| about_file(error, file))?;
            output.print(&restored, &restored_rows(&restored));
            output.note(&format!(
                "start it with `ownerserve serve --data-dir {}`; it is a cluster of its own, and others join it with \
                 empty folders. Never let it and the old one serve the same workers",
                data_dir.display()
            ));
        }
    }
    Ok(())
}

/// Brings a snapshot here, under another name until it is whole and on the disk.
async fn save(client: &Client, file: &Path) -> Result<String, CtlError> {
    let broken = |path: &Path| {
        let path = path.display().to_string();
        move |source| CtlError::File { path, source }
    };
    if file == Path::new("-") {
        return Err(CtlError::Usage("a snapshot is saved to a file, not to standard output; name one".into()));
    }
    if file.exists() {
        return Err(CtlError::Usage(format!("{} is there already; name a new file", file.display())));
    }
    let part = file.with_added_extension("part");
    let (endpoint, answer) = client.open("cluster/snapshot").await?;
    let mut out = tokio::fs::File::create(&part).await.map_err(broken(&part))?;
    let mut body = answer.into_body();
    while let Some(frame) = body.frame().await {
        let frame =
            frame.map_err(|error| CtlError::NoAnswer { endpoint: endpoint.clone(), detail: error.to_string() })?;
        if let Ok(piece) = frame.into_data() {
            out.write_all(&piece).await.map_err(broken(&part))?;
        }
    }
    out.sync_all().await.map_err(broken(&part))?;
    // What does not read back is no backup.
    verified(&part)?;
    tokio::fs::rename(&part, file).await.map_err(broken(file))?;
    Ok(endpoint)
}

fn verified(file: &Path) -> Result<SnapshotReport, CtlError> {
    ownership::verify(file).map_err(|error| about_file(error, file))
}

/// A backup that cannot be read is no data directory, and what helps is another one.
fn about_file(error: OwnershipError, file: &Path) -> CtlError {
    match error {
        OwnershipError::Damaged { path, detail } if path == file => CtlError::Damaged { path, detail },
        OwnershipError::Io { path, source } if path == file => {
            CtlError::File { path: path.display().to_string(), source }
        }
        other => other.into(),
    }
}

fn report_rows(report: &SnapshotReport) -> Vec<(&'static str, String)> {
    let cluster = report.cluster.map_or("not recorded".into(), |cluster| cluster.to_string());
    let voters: Vec<String> = report.voters.iter().map(ToString::to_string).collect();
    let mut rows = vec![
        ("cluster", cluster),
        ("applied", report.applied.to_string()),
        ("term", report.term.to_string()),
        ("level", report.level.to_string()),
        ("generation", report.generation.to_string()),
        ("voters", voters.join(" ")),
    ];
    rows.extend(report.entries.iter().map(|(kind, count)| (*kind, count.to_string())));
    rows.push(("state hash", report.state_hash.to_string()));
    rows.push(("layout", report.layout.to_string()));
    rows.push(("bytes", report.bytes.to_string()));
    rows
}

fn restored_rows(restored: &Restored) -> Vec<(&'static str, String)> {
    vec![
        ("cluster", restored.cluster.to_string()),
        ("node", restored.node.to_string()),
        ("generation", restored.generation.to_string()),
        ("applied", restored.applied.to_string()),
    ]
}
