//! Files that git tracks or would track; build outputs never count.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::RepositoryError;

/// Root of the checkout.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("this crate lies one below the root").to_path_buf()
}

/// Paths from the root of all tracked files and of new ones that are not ignored, sorted.
pub fn tracked() -> Result<Vec<String>, RepositoryError> {
    let output = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(root())
        .output()
        .map_err(RepositoryError::io("git ls-files"))?;
    if !output.status.success() {
        let why = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(RepositoryError::Form { what: "git ls-files".into(), why });
    }
    let listing = String::from_utf8_lossy(&output.stdout);
    let mut paths: Vec<String> = listing.split('\0').filter(|path| !path.is_empty()).map(str::to_owned).collect();
    paths.retain(|path| root().join(path).is_file());
    paths.sort();
    paths.dedup();
    Ok(paths)
}

/// Rust source file.
pub struct SourceFile {
    /// Path from the root.
    pub path: String,
    /// Contents.
    pub text: String,
}

impl SourceFile {
    /// Returns whether the whole file is test code.
    pub fn is_test(&self) -> bool {
        let inside = self.path.strip_prefix("tests/").unwrap_or(&self.path);
        inside.split('/').any(|part| part == "tests" || part == "tests.rs" || part.ends_with("_tests.rs"))
    }
}

/// Reads every Rust source file.
pub fn sources() -> Result<Vec<SourceFile>, RepositoryError> {
    let paths = tracked()?.into_iter().filter(|path| path.ends_with(".rs"));
    paths
        .map(|path| {
            let text = std::fs::read_to_string(root().join(&path)).map_err(RepositoryError::io(path.clone()))?;
            Ok(SourceFile { path, text })
        })
        .collect()
}
