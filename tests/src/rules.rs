//! This repository as data: its files, crates and measures. Never writes.

mod crates;
mod files;
mod import_graph;
mod measure;

pub use crates::{Crates, Dependency, ExternalCrate};
pub use files::{SourceFile, root, sources, tracked};
pub use import_graph::{ImportArrow, ImportGraph};
use measure::is_test_only;
pub use measure::{FileMeasures, measure, type_names};

/// Errors of reading the repository.
#[derive(Debug, thiserror::Error)]
pub enum RepositoryError {
    /// A file operation or a command failed.
    #[error("{what}: {source}")]
    Io {
        /// The file or the command.
        what: String,
        /// The cause.
        source: std::io::Error,
    },
    /// A source file does not parse.
    #[error("{path}: {source}")]
    Rust {
        /// Path of the file.
        path: String,
        /// Position and reason.
        source: syn::Error,
    },
    /// A file or a tool's output is malformed.
    #[error("{what}: {why}")]
    Form {
        /// The file or the output.
        what: String,
        /// The reason.
        why: String,
    },
}

impl RepositoryError {
    fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let what = what.into();
        move |source| RepositoryError::Io { what, source }
    }
}
