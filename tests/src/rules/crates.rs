//! Crate dependencies as resolved by Cargo.

use std::collections::BTreeMap;
use std::process::Command;

use serde::Deserialize;

use super::{RepositoryError, root};

/// Crates of the workspace and their external dependencies.
pub struct Crates {
    /// Workspace crates by name, with their dependencies of all tables.
    pub workspace: Vec<(String, Vec<Dependency>)>,
    /// Root files of the libraries and binaries of workspace crates, as paths from the root.
    pub targets: BTreeMap<String, Vec<String>>,
    /// External crates.
    pub external: Vec<ExternalCrate>,
}

/// One entry of a dependency table.
#[derive(Deserialize, Clone, Debug)]
pub struct Dependency {
    /// Name of the crate.
    pub name: String,
    /// `None` for `[dependencies]`, otherwise `dev` or `build`.
    pub kind: Option<String>,
    /// Set if the crate is in this workspace.
    pub path: Option<String>,
}

/// External crate.
#[derive(Deserialize, Clone, Debug)]
pub struct ExternalCrate {
    /// Name.
    pub name: String,
    /// Version.
    pub version: String,
    /// License expression.
    pub license: Option<String>,
    /// Registry or repository.
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
    targets: Vec<CargoTarget>,
    #[serde(flatten)]
    published: PackageRelease,
}

#[derive(Deserialize)]
struct CargoTarget {
    kind: Vec<String>,
    src_path: String,
}

#[derive(Deserialize)]
struct PackageRelease {
    version: String,
    license: Option<String>,
    source: Option<String>,
}

impl Crates {
    /// Runs `cargo metadata` for the platform that is served on.
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
        let targets = own.iter().map(|package| (package.name.clone(), package.roots())).collect();
        Ok(Crates {
            targets,
            workspace: own.into_iter().map(|package| (package.name, package.dependencies)).collect(),
            external: external.into_iter().map(ExternalCrate::from).collect(),
        })
    }
}

impl CargoPackage {
    /// Root files of the library and the binaries, without tests, examples and benchmarks.
    fn roots(&self) -> Vec<String> {
        let shipped = |kind: &String| kind == "lib" || kind == "bin";
        let shipped = self.targets.iter().filter(|target| target.kind.iter().any(shipped));
        let folder = format!("{}/", root().display());
        shipped.filter_map(|target| target.src_path.strip_prefix(&folder)).map(str::to_owned).collect()
    }
}

impl From<CargoPackage> for ExternalCrate {
    fn from(package: CargoPackage) -> Self {
        let PackageRelease { version, license, source } = package.published;
        ExternalCrate { name: package.name, version, license, source }
    }
}
