//! Who uses whom, as Cargo resolved it.

use std::process::Command;

use serde::Deserialize;

use super::{RepositoryError, root};

/// The workspace's crates and everything they pull in.
pub struct Crates {
    /// Our own, by name, with each dependency in any table.
    pub workspace: Vec<(String, Vec<Dependency>)>,
    /// The rest of the tree.
    pub external: Vec<ExternalCrate>,
}

/// One line of a dependency table.
#[derive(Deserialize, Clone, Debug)]
pub struct Dependency {
    /// The crate's name.
    pub name: String,
    /// `None` for `[dependencies]`, else `dev` or `build`.
    pub kind: Option<String>,
    /// Set when it lies in this workspace.
    pub path: Option<String>,
}

/// A crate that others publish.
#[derive(Deserialize, Clone, Debug)]
pub struct ExternalCrate {
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: String,
    /// Its licence expression.
    pub license: Option<String>,
    /// Its registry or repository.
    pub source: Option<String>,
}

#[derive(Deserialize)]
struct CargoMetadata {
    packages: Vec<CargoPackage>,
}

#[derive(Deserialize)]
struct CargoPackage {
    name: String,
    dependencies: Vec<Dependency>,
    #[serde(flatten)]
    published: PublishedCrate,
}

#[derive(Deserialize)]
struct PublishedCrate {
    version: String,
    license: Option<String>,
    source: Option<String>,
}

impl Crates {
    /// Asks Cargo, for the platform that is served on.
    pub fn read() -> Result<Crates, RepositoryError> {
        let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
        let output = Command::new(cargo)
            .args(["metadata", "--format-version", "1", "--locked", "--filter-platform", "x86_64-unknown-linux-gnu"])
            .current_dir(root())
            .output()
            .map_err(RepositoryError::io("cargo metadata"))?;
        if !output.status.success() {
            let why = String::from_utf8_lossy(&output.stderr).into_owned();
            return Err(RepositoryError::Form { what: "cargo metadata".into(), why });
        }
        let metadata: CargoMetadata = serde_json::from_slice(&output.stdout)
            .map_err(|error| RepositoryError::Form { what: "cargo metadata".into(), why: error.to_string() })?;
        let (own, external): (Vec<CargoPackage>, Vec<CargoPackage>) =
            metadata.packages.into_iter().partition(|package| package.published.source.is_none());
        Ok(Crates {
            workspace: own.into_iter().map(|package| (package.name, package.dependencies)).collect(),
            external: external.into_iter().map(ExternalCrate::from).collect(),
        })
    }
}

impl From<CargoPackage> for ExternalCrate {
    fn from(package: CargoPackage) -> Self {
        let PublishedCrate { version, license, source } = package.published;
        ExternalCrate { name: package.name, version, license, source }
    }
}
