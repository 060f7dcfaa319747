//! The copy of the sources that bugs are edited into. The sources that are shipped are read, and never written.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use toml::{Table, Value};

use crate::bugs::{Bugs, Edit, LIST, read};
use crate::{Result, at};

/// Crates whose sources are copied.
const CRATES: [&str; 4] = ["ownership/vocabulary", "ownership/ledger", "ownership/consensus", "ownership/simulation"];

/// Where the copied members lie in the copied workspace. Cargo names artifacts by the path below the workspace's root, and
/// in another folder the copy's never take the place of the real ones in the target folder that they share.
const FOLDER: &str = "copy";

/// The binary of the copy.
const BINARY: &str = "simulate-planted";

const CHOOSER: &str = r#"
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
type Files = BTreeMap<PathBuf, String>;

/// Copies, edits and builds. Returns the binary, and the bugs that are in it.
pub(crate) fn plant() -> Result<(PathBuf, Bugs)> {
    let root = root()?;
    let copy = root.join("target/planted");
    let (sources, bugs) = edited(&root)?;
    let mut files = workspace(&root)?;
    files.extend(sources.into_iter().map(|(path, text)| (Path::new(FOLDER).join(path), text)));
    write(&copy, &files)?;
    let mut build = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    // The features of all members, as wherever the whole workspace is built: no dependency is built for the copy alone.
    build.args(["build", "--profile", "ci", "--offline", "--locked", "--workspace", "--bin", BINARY]);
    build.current_dir(&copy).env("CARGO_TARGET_DIR", root.join("target"));
    if build.status().map_err(at(build.get_program()))?.success() {
        return Ok((root.join("target/ci").join(BINARY), bugs));
    }
    Err(format!(
        "the edited copy does not build; correct `replace` in {LIST} of the bug that stands where the compiler points"
    )
    .into())
}

fn root() -> Result<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    root.canonicalize().map_err(at(root))
}

/// The sources with every bug in them, and the bugs.
fn edited(root: &Path) -> Result<(Files, Bugs)> {
    let bugs = read(&text_of(root, LIST)?)?;
    let mut files = sources(root)?;
    for edit in &bugs.edits {
        edit_file(&mut files, edit)?;
    }
    for (file, text) in &mut files {
        if file.ends_with("vocabulary/src/lib.rs") {
            text.push_str(CHOOSER);
        }
        if file.ends_with("simulation/Cargo.toml") {
            *text = text.replace("simulate-quorum", BINARY);
        }
    }
    Ok((files, bugs))
}

/// The sources as they are shipped.
fn sources(root: &Path) -> Result<Files> {
    let mut files = Files::new();
    for name in CRATES {
        read_all(root, Path::new(name), &mut files)?;
    }
    Ok(files)
}

fn text_of(root: &Path, file: impl AsRef<Path>) -> Result<String> {
    let path = root.join(file);
    fs::read_to_string(&path).map_err(at(path))
}

fn read_all(root: &Path, folder: &Path, files: &mut Files) -> Result<()> {
    let at = || at(root.join(folder));
    for entry in fs::read_dir(root.join(folder)).map_err(at())? {
        let entry = entry.map_err(at())?;
        let path = folder.join(entry.file_name());
        if entry.file_type().map_err(at())?.is_dir() {
            read_all(root, &path, files)?;
        } else if path.extension().is_some_and(|extension| extension == "rs" || extension == "toml") {
            files.insert(path.clone(), text_of(root, &path)?);
        }
    }
    Ok(())
}

fn edit_file(files: &mut Files, edit: &Edit) -> Result<()> {
    let Edit { name, file, find, replace, .. } = edit;
    let path = file.display();
    let text = files.get_mut(file).ok_or_else(|| format!("{name}: there is no {path}; correct `file` in {LIST}"))?;
    match text.matches(find.as_str()).count() {
        1 => *text = text.replacen(find, replace, 1),
        places => {
            let why = "change it so that it stands once, in";
            return Err(format!("{name}: `find` stands {places} times in {path}; {why} {LIST}").into());
        }
    }
    Ok(())
}

/// The manifests of the whole workspace: its profiles, its lock file, and members that are empty where they are not copied.
fn workspace(root: &Path) -> Result<Files> {
    let text = text_of(root, "Cargo.toml")?;
    let (manifest, members) = moved(&text)?;
    let mut files = Files::from([("Cargo.toml".into(), manifest), ("Cargo.lock".into(), text_of(root, "Cargo.lock")?)]);
    for member in members.iter().filter(|member| !CRATES.contains(&member.as_str())) {
        let file = Path::new(member).join("Cargo.toml");
        let hollow = hollow(&text_of(root, &file)?).map_err(|error| format!("{}: {error}", file.display()))?;
        files.insert(Path::new(FOLDER).join(file), hollow);
        files.insert(Path::new(FOLDER).join(member).join("src/lib.rs"), String::new());
    }
    Ok(files)
}

/// The workspace's manifest with its members in the copy's folder, and the members as they were.
fn moved(text: &str) -> Result<(String, Vec<String>)> {
    let mut table: Table = text.parse()?;
    let mut members = Vec::new();
    if let Some(Value::Table(workspace)) = table.get_mut("workspace") {
        workspace.remove("default-members");
        let named = workspace.get_mut("members").and_then(Value::as_array_mut);
        for member in named.into_iter().flatten() {
            members.extend(member.as_str().map(str::to_owned));
            *member = in_folder(member);
        }
        let dependencies = workspace.get_mut("dependencies").and_then(Value::as_table_mut);
        let paths = dependencies.into_iter().flatten().filter_map(|(_, dependency)| dependency.get_mut("path"));
        paths.for_each(|path| *path = in_folder(path));
    }
    Ok((table.to_string(), members))
}

fn in_folder(path: &Value) -> Value {
    format!("{FOLDER}/{}", path.as_str().unwrap_or_default()).into()
}

/// A member's manifest without its targets: what it depends on decides the features of all dependencies.
fn hollow(text: &str) -> Result<String> {
    let mut table: Table = text.parse()?;
    table.retain(|section, _| !["bin", "lib", "test", "bench", "example"].contains(&section));
    if let Some(Value::Table(package)) = table.get_mut("package") {
        package.remove("default-run");
    }
    Ok(table.to_string())
}

/// Writes what is different, so that nothing is built again for nothing, and removes what is not there any more.
fn write(copy: &Path, files: &Files) -> Result<()> {
    let mut there = Files::new();
    if copy.join(FOLDER).exists() {
        read_all(copy, Path::new(FOLDER), &mut there)?;
    }
    for path in there.keys().filter(|path| !files.contains_key(*path)) {
        fs::remove_file(copy.join(path)).map_err(at(path))?;
    }
    for (path, text) in files {
        let path = copy.join(path);
        if fs::read_to_string(&path).is_ok_and(|old| old == *text) {
            continue;
        }
        let folder = path.parent().unwrap_or(copy);
        fs::create_dir_all(folder).and_then(|()| fs::write(&path, text)).map_err(at(&path))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bug_still_fits_into_the_sources_and_says_what_it_is() {
        let (files, bugs) = edited(&root().unwrap()).unwrap();
        for edit in &bugs.edits {
            assert!(edit.replace.contains(&edit.name) || edit.replace.contains("pub fn"), "{} is never off", edit.name);
        }
        assert_eq!(bugs.known.len(), 46);
        assert!(bugs.known.values().all(Option::is_some), "{:?}", bugs.known);
        assert!(files.values().any(|text| text.contains(concat!("planted::", "on("))));
        assert!(files[Path::new("ownership/simulation/Cargo.toml")].contains(&format!("name = \"{BINARY}\"")));
    }

    #[test]
    fn the_sources_that_are_shipped_hold_none() {
        let files = sources(&root().unwrap()).unwrap();
        let planted = concat!("planted::", "on(");
        let here = |(path, text): &(&PathBuf, &String)| !path.ends_with("bugs.toml") && text.contains(planted);
        let found: Vec<_> = files.iter().filter(here).map(|(path, _)| path).collect();
        assert_eq!(found, Vec::<&PathBuf>::new());
    }

    #[test]
    fn the_copied_workspace_has_every_member_and_the_profiles_of_the_real_one() {
        let root = root().unwrap();
        let files = workspace(&root).unwrap();
        let table = |text: &str| text.parse::<Table>().unwrap();
        let (real, copied) = (table(&text_of(&root, "Cargo.toml").unwrap()), table(&files[Path::new("Cargo.toml")]));
        assert_eq!(real["profile"], copied["profile"]);
        assert_eq!(copied["workspace"]["dependencies"]["ledger"]["path"].as_str(), Some("copy/ownership/ledger"));
        let members = copied["workspace"]["members"].as_array().unwrap();
        assert_eq!(members.len(), real["workspace"]["members"].as_array().unwrap().len());
        let manifest = &files[Path::new("copy/tests/Cargo.toml")];
        assert!(manifest.contains("[dependencies") && !manifest.contains("default-run"), "{manifest}");
    }
}
