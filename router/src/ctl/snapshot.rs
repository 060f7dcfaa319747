//! `ownerserve ctl snapshot`: snapshots as files.

use std::path::PathBuf;

use clap::Subcommand;
use ownership::{OwnershipError, Restored, SnapshotReport};

use super::Output;

#[derive(Clone, Debug, Subcommand)]
pub(crate) enum SnapshotCommand {
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

pub(crate) async fn run(command: &SnapshotCommand, output: Output) -> Result<(), OwnershipError> {
    match command {
        SnapshotCommand::Verify { file } => {
            let report = ownership::verify(file)?;
            output.print(&report, &report_rows(&report));
        }
        SnapshotCommand::Restore { file, data_dir } => {
            let restored = ownership::restore(file, data_dir).await?;
            output.print(&restored, &restored_rows(&restored));
        }
    }
    Ok(())
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
