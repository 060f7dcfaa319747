//! This repository read as data: its files, its crates, its measures. Never writes.

mod crates;
mod files;
mod measure;

pub use crates::{Crates, Dependency, ExternalCrate};
pub use files::{SourceFile, root, sources, tracked};
pub use measure::{FileMeasures, measure};

/// Why the repository could not be read.
#[derive(Debug, thiserror::Error)]
pub enum RepositoryError {
    /// A file or a command failed.
    #[error("{what}: {source}")]
    Io {
        /// What was read or run.
        what: String,
        /// How it failed.
        source: std::io::Error,
    },
    /// A source file does not parse.
    #[error("{path}: {source}")]
    Rust {
        /// Which file.
        path: String,
        /// Where and why.
        source: syn::Error,
    },
    /// Something that a tool or a person wrote is not in the form it should be.
    #[error("{what}: {why}")]
    Form {
        /// Which file or output.
        what: String,
        /// What is wrong with it.
        why: String,
    },
}

impl RepositoryError {
    fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let what = what.into();
        move |source| RepositoryError::Io { what, source }
    }
}
