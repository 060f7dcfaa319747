//! `ownerserve ctl snapshot`: snapshots of the ledger as files.

use std::path::{Path, PathBuf};

use clap::Subcommand;
use http_body_util::BodyExt as _;
use ownership::{LedgerNodeError, SnapshotReport};
use serde_json::{Value, json};
use tempfile::{Builder, NamedTempFile};
use tokio::io::AsyncWriteExt as _;

use super::client::OperatorClient;
use super::error::CtlError;
use super::output::OutputFormat;
use super::table::field_list;
use super::writes;

#[derive(Clone, Debug, Subcommand)]
pub(crate) enum SnapshotCommand {
    /// Downloads a snapshot of a running node, for a backup.
    Save {
        /// The file to write; it must not exist yet.
        file: PathBuf,
    },
    /// Lets a running node write a snapshot to its own disk.
    Create,
    /// Reads and checks every byte of a snapshot, and shows what it holds.
    Verify {
        /// The snapshot.
        file: PathBuf,
    },
    /// Creates the data directory of a new cluster of one node from a snapshot.
    Restore {
        /// The snapshot.
        file: PathBuf,
        /// The new data directory; it must be empty or must not exist yet.
        #[arg(long, value_name = "DIR")]
        data_dir: PathBuf,
    },
}

pub(crate) async fn run(
    client: &OperatorClient,
    command: &SnapshotCommand,
    output: OutputFormat,
) -> Result<(), CtlError> {
    match command {
        SnapshotCommand::Save { file } => {
            let endpoint = save(client, file).await?;
            let report = verify_file(file)?;
            output.print(&report_json(&report), || field_list(report_rows(&report)));
            output.note(&format!("saved from {endpoint}"));
        }
        SnapshotCommand::Create => {
            writes::run(client, writes::post("cluster/snapshot", json!({})), output).await?;
        }
        SnapshotCommand::Verify { file } => {
            let report = verify_file(file)?;
            output.print(&report_json(&report), || field_list(report_rows(&report)));
        }
        SnapshotCommand::Restore { file, data_dir } => {
            let restored = ownership::restore(file, data_dir).await.map_err(|error| verification_error(error, file))?;
            output.print(&restored, || {
                field_list([
                    ("cluster", restored.cluster.to_string()),
                    ("node", restored.node.to_string()),
                    ("generation", restored.generation.to_string()),
                    ("applied", restored.applied.to_string()),
                ])
            });
            output.note(&format!(
                "start it with `ownerserve serve --data-dir {}`; it is a new cluster, which other nodes join with empty \
                 data directories. Never let it and the old cluster serve the same workers",
                data_dir.display()
            ));
        }
    }
    Ok(())
}

/// Downloads a snapshot under a temporary name until it is complete and synced. Only its owner may read it, because
/// it holds everything. An incomplete file is deleted.
async fn save(client: &OperatorClient, file: &Path) -> Result<String, CtlError> {
    if file == Path::new("-") {
        return Err(CtlError::Usage(
            "a snapshot cannot be saved to standard output; give the path of a new file".into(),
        ));
    }
    let there = || CtlError::Usage(format!("{} exists already; give the path of a new file", file.display()));
    if file.exists() {
        return Err(there());
    }
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let part = Builder::new().prefix(".ownerserve-").suffix(".part").tempfile_in(folder).map_err(file_error(folder))?;
    let endpoint = tokio::select! {
        brought = download(client, &part) => brought?,
        _ = tokio::signal::ctrl_c() => return Err(file_error(file)(std::io::ErrorKind::Interrupted.into())),
    };
    part.persist_noclobber(file).map_err(|error| match error.error.kind() {
        std::io::ErrorKind::AlreadyExists => there(),
        _ => file_error(file)(error.error),
    })?;
    // Makes the new name durable.
    std::fs::File::open(folder).and_then(|folder| folder.sync_all()).map_err(file_error(folder))?;
    Ok(endpoint)
}

fn file_error(path: &Path) -> impl Fn(std::io::Error) -> CtlError {
    let path = path.display().to_string();
    move |source| CtlError::File { path: path.clone(), source }
}

/// Downloads into `part` and verifies it.
async fn download(client: &OperatorClient, part: &NamedTempFile) -> Result<String, CtlError> {
    let (endpoint, answer) = client.open("cluster/snapshot").await?;
    let mut out = tokio::fs::File::from_std(part.reopen().map_err(file_error(part.path()))?);
    let mut body = answer.into_body();
    while let Some(frame) = body.frame().await {
        let frame = frame
            .map_err(|error| CtlError::ReadUnanswered { endpoint: endpoint.clone(), detail: error.to_string() })?;
        if let Ok(piece) = frame.into_data() {
            out.write_all(&piece).await.map_err(file_error(part.path()))?;
        }
    }
    out.sync_all().await.map_err(file_error(part.path()))?;
    // A file that cannot be read back is not a backup.
    verify_file(part.path())?;
    Ok(endpoint)
}

/// Formats the report for programs: the counts per kind, by name.
fn report_json(report: &SnapshotReport) -> Value {
    let mut shown = serde_json::to_value(report).expect("an answer encodes");
    shown["entries"] = report.entries.iter().map(|(kind, count)| ((*kind).to_owned(), json!(count))).collect();
    shown
}

fn verify_file(file: &Path) -> Result<SnapshotReport, CtlError> {
    ownership::verify(file).map_err(|error| verification_error(error, file))
}

/// Converts the error: an unreadable backup is not a data directory, and the advice is to use another backup.
fn verification_error(error: LedgerNodeError, file: &Path) -> CtlError {
    match error {
        LedgerNodeError::Damaged { path, detail } if path == file => CtlError::Damaged { path, detail },
        LedgerNodeError::Io { path, source } if path == file => {
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

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use vocabulary::TimeSpan;

    use super::super::client::{ClientTimeouts, OperatorClientOptions};
    use super::*;
    use crate::testing::start_router_at;

    #[tokio::test]
    async fn backup_is_private_counted_and_overwrites_no_file() {
        let (router, folder) = (start_router_at(&[], &[]).await, tempfile::tempdir().unwrap());
        let endpoints = vec![format!("http://{}", router.operator_address())];
        let waits = ClientTimeouts::with_timeout(TimeSpan::seconds(30));
        let client =
            OperatorClient::new(OperatorClientOptions { endpoints, token: None, timeouts: waits, cacert: None })
                .unwrap();
        let (file, other) = (folder.path().join("x"), folder.path().join("x.part"));
        std::fs::write(&other, "precious").unwrap();
        save(&client, &file).await.unwrap();
        assert_eq!(std::fs::read_to_string(&other).unwrap(), "precious");
        assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
        let shown = report_json(&verify_file(&file).unwrap());
        assert!(shown["entries"]["sessions"].is_u64(), "{shown}");
        assert_eq!(save(&client, &file).await.unwrap_err().exit_code(), 2, "it is not written over");
        router.stop().await;
        assert_eq!(save(&client, &folder.path().join("y")).await.unwrap_err().exit_code(), 3);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2, "nothing is left of what failed");
    }
}
