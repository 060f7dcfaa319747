//! What keeps bugs from being planted, and what to do about it.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::bugs::LIST;

/// A failure before any seed says something.
#[derive(Debug, Error)]
pub(crate) enum PlantError {
    #[error("{LIST} cannot be read: {0}")]
    List(Box<toml::de::Error>),
    #[error("{name}: no edit says what it is; give one of them `what` in {LIST}")]
    WithoutWhat { name: String },
    #[error("{name}: two edits say what it is; leave `what` at one of them in {LIST}")]
    SaidTwice { name: String },
    #[error("{name}: `seed` and `check` stand at an edit without `what`; move them beside it in {LIST}")]
    SeedWithoutWhat { name: String },
    #[error(
        "{name}: `seed` and `check` belong together; add the other one in {LIST}, or remove both and run this again"
    )]
    HalfAFinding { name: String },
    #[error("there is no bug named {name}; {LIST} names them all")]
    Unknown { name: String },
    #[error("{name}: there is no {}; correct `file` in {LIST}", file.display())]
    NoFile { name: String, file: PathBuf },
    #[error("{name}: `find` stands {places} times in {}; change it in {LIST} so that it stands once", file.display())]
    Places { name: String, file: PathBuf, places: usize },
    #[error("{} is not a manifest that can be copied: {detail}", file.display())]
    Manifest { file: PathBuf, detail: String },
    #[error(
        "the edited copy does not build; correct `replace` in {LIST} of the bug that stands where the compiler points"
    )]
    Build,
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
}

impl PlantError {
    /// A failure to read or write a path, or to start it.
    pub(crate) fn at(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { path, source }
    }
}
