//! Copy of the sources into which bugs are planted. The real sources are read and never written.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use toml::{Table, Value};

use crate::bugs::{BUGS_FILE, BugList, SourceEdit, read};
use crate::{Result, io_error_at};

/// Crates whose sources are copied.
const CRATES: [&str; 4] = ["ownership/vocabulary", "ownership/ledger", "ownership/consensus", "ownership/simulation"];

/// Folder of the copied members in the copied workspace. Cargo names artifacts by the path below the workspace's root,
/// so in another folder the copy's artifacts never replace the real ones in the shared target folder.
const COPY_DIR: &str = "copy";

/// Binary of the copy.
const BINARY: &str = "simulate-planted";

const SELECTOR_SOURCE: &str = r#"
/// Which planted bug is switched on.
pub mod planted {
    use std::sync::OnceLock;

    static BUG: OnceLock<Option<String>> = OnceLock::new();

    /// Whether this one is.
    pub fn on(name: &str) -> bool {
        BUG.get_or_init(|| std::env::var("PLANTED_BUG").ok()).as_deref() == Some(name)
    }
}
"#;

/// Files by their path from the root.
type SourceFiles = BTreeMap<PathBuf, String>;

/// Copies, edits and builds. Returns the binary and the bugs in it.
pub(crate) fn plant() -> Result<(PathBuf, BugList)> {
    let root = root()?;
    let copy = root.join("target/planted");
    let (sources, bugs) = sources_with_bugs(&root)?;
    let mut files = workspace(&root)?;
    files.extend(sources.into_iter().map(|(path, text)| (Path::new(COPY_DIR).join(path), text)));
    write(&copy, &files)?;
    let mut build = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    // Uses the features of all members, like a build of the whole workspace, so that dependencies are not built again.
    build.args(["build", "--profile", "ci", "--offline", "--locked", "--workspace", "--bin", BINARY]);
    build.current_dir(&copy).env("CARGO_TARGET_DIR", root.join("target"));
    if build.status().map_err(io_error_at(build.get_program()))?.success() {
        return Ok((root.join("target/ci").join(BINARY), bugs));
    }
    Err(format!(
        "the edited copy does not build; correct `replace` in {BUGS_FILE} of the bug that stands where the compiler points"
    )
    .into())
}

fn root() -> Result<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    root.canonicalize().map_err(io_error_at(root))
}

/// Returns the sources with every bug planted, and the bugs.
fn sources_with_bugs(root: &Path) -> Result<(SourceFiles, BugList)> {
    let bugs = read(&read_source(root, BUGS_FILE)?)?;
    let mut files = sources(root)?;
    for edit in &bugs.edits {
        edit_file(&mut files, edit)?;
    }
    for (file, text) in &mut files {
        if file.ends_with("vocabulary/src/lib.rs") {
            text.push_str(SELECTOR_SOURCE);
        }
        if file.ends_with("simulation/Cargo.toml") {
            *text = text.replace("simulate-quorum", BINARY);
        }
    }
    Ok((files, bugs))
}

/// Returns the real sources.
fn sources(root: &Path) -> Result<SourceFiles> {
    let mut files = SourceFiles::new();
    for name in CRATES {
        read_all(root, Path::new(name), &mut files)?;
    }
    Ok(files)
}

fn read_source(root: &Path, file: impl AsRef<Path>) -> Result<String> {
    let path = root.join(file);
    fs::read_to_string(&path).map_err(io_error_at(path))
}

fn read_all(root: &Path, folder: &Path, files: &mut SourceFiles) -> Result<()> {
    let at = || io_error_at(root.join(folder));
    for entry in fs::read_dir(root.join(folder)).map_err(at())? {
        let entry = entry.map_err(at())?;
        let path = folder.join(entry.file_name());
        if entry.file_type().map_err(at())?.is_dir() {
            read_all(root, &path, files)?;
        } else if path.extension().is_some_and(|extension| extension == "rs" || extension == "toml") {
            files.insert(path.clone(), read_source(root, &path)?);
        }
    }
    Ok(())
}

fn edit_file(files: &mut SourceFiles, edit: &SourceEdit) -> Result<()> {
    let SourceEdit { name, file, find, replace, .. } = edit;
    let path = file.display();
    let text =
        files.get_mut(file).ok_or_else(|| format!("{name}: there is no {path}; correct `file` in {BUGS_FILE}"))?;
    match text.matches(find.as_str()).count() {
        1 => *text = text.replacen(find, replace, 1),
        places => {
            let why = "change it so that it stands once, in";
            return Err(format!("{name}: `find` stands {places} times in {path}; {why} {BUGS_FILE}").into());
        }
    }
    Ok(())
}

/// Returns the manifests of the whole workspace: profiles, lock file, and members, which are empty if they are not
/// copied.
fn workspace(root: &Path) -> Result<SourceFiles> {
    let text = read_source(root, "Cargo.toml")?;
    let (manifest, members) = relocate_members(&text)?;
    let mut files =
        SourceFiles::from([("Cargo.toml".into(), manifest), ("Cargo.lock".into(), read_source(root, "Cargo.lock")?)]);
    for member in members.iter().filter(|member| !CRATES.contains(&member.as_str())) {
        let file = Path::new(member).join("Cargo.toml");
        let hollow =
            strip_targets(&read_source(root, &file)?).map_err(|error| format!("{}: {error}", file.display()))?;
        files.insert(Path::new(COPY_DIR).join(file), hollow);
        files.insert(Path::new(COPY_DIR).join(member).join("src/lib.rs"), String::new());
    }
    Ok(files)
}

/// Returns the workspace's manifest with its members in the copy's folder, and the original members.
fn relocate_members(text: &str) -> Result<(String, Vec<String>)> {
    let mut table: Table = text.parse()?;
    let mut members = Vec::new();
    if let Some(Value::Table(workspace)) = table.get_mut("workspace") {
        workspace.remove("default-members");
        let named = workspace.get_mut("members").and_then(Value::as_array_mut);
        for member in named.into_iter().flatten() {
            members.extend(member.as_str().map(str::to_owned));
            *member = relocated_path(member);
        }
        let dependencies = workspace.get_mut("dependencies").and_then(Value::as_table_mut);
        let paths = dependencies.into_iter().flatten().filter_map(|(_, dependency)| dependency.get_mut("path"));
        paths.for_each(|path| *path = relocated_path(path));
    }
    Ok((table.to_string(), members))
}

fn relocated_path(path: &Value) -> Value {
    format!("{COPY_DIR}/{}", path.as_str().unwrap_or_default()).into()
}

/// Returns a member's manifest without its targets; its dependencies decide the features of all dependencies.
fn strip_targets(text: &str) -> Result<String> {
    let mut table: Table = text.parse()?;
    table.retain(|section, _| !["bin", "lib", "test", "bench", "example"].contains(&section));
    if let Some(Value::Table(package)) = table.get_mut("package") {
        package.remove("default-run");
    }
    Ok(table.to_string())
}

/// Writes only files that differ, to avoid needless builds, and removes files that no longer exist.
fn write(copy: &Path, files: &SourceFiles) -> Result<()> {
    let mut there = SourceFiles::new();
    if copy.join(COPY_DIR).exists() {
        read_all(copy, Path::new(COPY_DIR), &mut there)?;
    }
    for path in there.keys().filter(|path| !files.contains_key(*path)) {
        fs::remove_file(copy.join(path)).map_err(io_error_at(path))?;
    }
    for (path, text) in files {
        let path = copy.join(path);
        if fs::read_to_string(&path).is_ok_and(|old| old == *text) {
            continue;
        }
        let folder = path.parent().unwrap_or(copy);
        fs::create_dir_all(folder).and_then(|()| fs::write(&path, text)).map_err(io_error_at(&path))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bug_still_applies_to_the_sources_and_has_a_description() {
        let (files, bugs) = sources_with_bugs(&root().unwrap()).unwrap();
        for edit in &bugs.edits {
            assert!(edit.replace.contains(&edit.name) || edit.replace.contains("pub fn"), "{} is never off", edit.name);
        }
        assert_eq!(bugs.findings.len(), 46);
        assert!(bugs.findings.values().all(Option::is_some), "{:?}", bugs.findings);
        assert!(files.values().any(|text| text.contains(concat!("planted::", "on("))));
        assert!(files[Path::new("ownership/simulation/Cargo.toml")].contains(&format!("name = \"{BINARY}\"")));
    }

    #[test]
    fn shipped_sources_contain_no_planted_bug() {
        let files = sources(&root().unwrap()).unwrap();
        let planted = concat!("planted::", "on(");
        let here = |(path, text): &(&PathBuf, &String)| !path.ends_with("bugs.toml") && text.contains(planted);
        let found: Vec<_> = files.iter().filter(here).map(|(path, _)| path).collect();
        assert_eq!(found, Vec::<&PathBuf>::new());
    }

    #[test]
    fn the_copied_workspace_has_every_member_and_profile() {
        let root = root().unwrap();
        let files = workspace(&root).unwrap();
        let table = |text: &str| text.parse::<Table>().unwrap();
        let (real, copied) =
            (table(&read_source(&root, "Cargo.toml").unwrap()), table(&files[Path::new("Cargo.toml")]));
        assert_eq!(real["profile"], copied["profile"]);
        assert_eq!(copied["workspace"]["dependencies"]["ledger"]["path"].as_str(), Some("copy/ownership/ledger"));
        let members = copied["workspace"]["members"].as_array().unwrap();
        assert_eq!(members.len(), real["workspace"]["members"].as_array().unwrap().len());
        let manifest = &files[Path::new("copy/tests/Cargo.toml")];
        assert!(manifest.contains("[dependencies") && !manifest.contains("default-run"), "{manifest}");
    }
}
