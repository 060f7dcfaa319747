//! The report's three files: checked before the runs, and written whole or not at all.

use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use simulator::report::{self, SimulationReport};
use tempfile::NamedTempFile;

use crate::ctl::pretty;

/// Why the report's path cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ReportPathError {
    #[error(
        "the report is to be {0}; accepted: a file whose name ends in .html (.json and .csv are written beside it)"
    )]
    Name(PathBuf),
    #[error("the report would replace {0}, which is no plain file; accepted: a new name, or a file to replace")]
    NotAFile(PathBuf),
    #[error("the report would replace {0}, which is read here; accepted: another name or folder")]
    Input(PathBuf),
    #[error("the report would lie in {0}, and be read as a part of the trace; accepted: another folder")]
    InTrace(PathBuf),
    #[error("cannot write the report {path}: {source}; accepted: a file in a folder that is there and may be written")]
    Unwritable { path: PathBuf, source: std::io::Error },
}

type ReportRenderer = fn(&SimulationReport) -> String;

/// Path of the page; the other two files have its name with another ending.
pub(super) struct ReportFiles {
    page: PathBuf,
}

impl ReportFiles {
    /// Checks that the paths can be written and are none of the inputs. Leaves nothing behind.
    pub(super) fn new(page: &Path, inputs: &[&Path]) -> Result<Self, ReportPathError> {
        if page.extension().is_none_or(|ending| ending != "html") || page.file_stem().is_none() {
            return Err(ReportPathError::Name(page.to_owned()));
        }
        let files = Self { page: page.to_owned() };
        for (path, _) in files.outputs() {
            if path.exists() && !path.is_file() {
                return Err(ReportPathError::NotAFile(path));
            }
            inputs.iter().try_for_each(|input| check_distinct(&path, input))?;
        }
        let folder = folder(page);
        let unwritable = |source| ReportPathError::Unwritable { path: page.to_owned(), source };
        tempfile::tempfile_in(folder).map_err(unwritable)?;
        Ok(files)
    }

    /// Returns the three paths, each with its renderer.
    fn outputs(&self) -> [(PathBuf, ReportRenderer); 3] {
        [
            (self.page.clone(), report::page),
            (self.page.with_extension("json"), pretty),
            (self.page.with_extension("csv"), |report| report::csv(&report.runs)),
        ]
    }

    pub(super) fn write(&self, report: &SimulationReport) -> Result<(), ReportPathError> {
        self.outputs().into_iter().try_for_each(|(path, text)| {
            let written = write_atomically(&path, &text(report));
            written.map_err(|source| ReportPathError::Unwritable { path, source })
        })
    }
}

/// Checks that the path is neither the input nor a file directly in an input folder.
fn check_distinct(path: &Path, input: &Path) -> Result<(), ReportPathError> {
    let Ok(input) = input.canonicalize() else { return Ok(()) };
    if path.canonicalize().is_ok_and(|path| path == input) {
        return Err(ReportPathError::Input(path.to_owned()));
    }
    if folder(path).canonicalize().is_ok_and(|folder| folder == input) {
        return Err(ReportPathError::InTrace(folder(path).to_owned()));
    }
    Ok(())
}

fn folder(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Writes a temporary file beside the target and renames it, so that the old file is replaced completely or not at all.
fn write_atomically(path: &Path, text: &str) -> std::io::Result<()> {
    let everybody = std::fs::Permissions::from_mode(0o666);
    let mut file: NamedTempFile =
        tempfile::Builder::new().prefix(".report").permissions(everybody).tempfile_in(folder(path))?;
    file.write_all(text.as_bytes())?;
    file.persist(path)?;
    Ok(())
}
