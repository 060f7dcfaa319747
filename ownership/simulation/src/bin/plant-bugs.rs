//! `plant-bugs`: shows that the simulation finds every bug of `planted/bugs.toml`.
//!
//! The sources that are shipped never hold one: they are copied, the copy is edited and built once, and each bug is
//! switched on in a run of its own.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write, stdout};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Instant;

use clap::Parser;
use serde::Deserialize;

/// Crates that are copied.
const CRATES: [&str; 4] = ["vocabulary", "ledger", "consensus", "simulation"];

/// Added to the vocabulary of the copy.
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

/// Plants bugs, and runs seeds until each is found.
#[derive(Parser)]
struct Options {
    /// Seeds that a bug may take; one that is not found by then was missed.
    #[arg(long, default_value_t = 2_000)]
    seeds: u64,
    /// Seeds that the copy must pass with no bug switched on.
    #[arg(long, default_value_t = 40)]
    control: u64,
    /// Only these.
    bugs: Vec<String>,
}

#[derive(Deserialize)]
struct Bugs {
    bug: Vec<Edit>,
}

/// One change of one file; a bug may need several.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Edit {
    name: String,
    #[serde(default)]
    what: String,
    file: PathBuf,
    find: String,
    replace: String,
}

fn main() -> ExitCode {
    let options = Options::parse();
    match plant().and_then(|(binary, bugs)| hunt(&options, &binary, &bugs)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            say(&format!("the bugs could not be planted: {error}"));
            ExitCode::FAILURE
        }
    }
}

fn root() -> io::Result<PathBuf> {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize()
}

/// The sources with every bug in them, and the bugs.
fn edited(root: &Path) -> io::Result<(BTreeMap<PathBuf, String>, Bugs)> {
    let text = fs::read_to_string(root.join("ownership/simulation/planted/bugs.toml"))?;
    let bugs: Bugs = toml::from_str(&text).map_err(io::Error::other)?;
    let mut files = BTreeMap::new();
    for name in CRATES {
        read_all(root, &Path::new("ownership").join(name), &mut files)?;
    }
    for edit in &bugs.bug {
        edit_file(&mut files, edit)?;
    }
    Ok((files, bugs))
}

/// Copies, edits and builds. Returns the binary, and what each bug is.
fn plant() -> io::Result<(PathBuf, BTreeMap<String, String>)> {
    let root = root()?;
    let copy = root.join("target/planted/sources");
    let (mut files, bugs) = edited(&root)?;
    if let Some(vocabulary) = files.get_mut(Path::new("ownership/vocabulary/src/lib.rs")) {
        vocabulary.push_str(CHOOSER);
    }
    files.insert("Cargo.toml".into(), workspace(&fs::read_to_string(root.join("Cargo.toml"))?)?);
    files.insert("Cargo.lock".into(), fs::read_to_string(root.join("Cargo.lock"))?);
    for (path, text) in &files {
        write_if_new(&copy.join(path), text)?;
    }
    let mut build = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    build.args(["build", "--release", "--offline", "-p", "simulation", "--bin", "simulate-quorum"]);
    build.current_dir(&copy).env("CARGO_TARGET_DIR", root.join("target/planted/target"));
    if !build.status()?.success() {
        return Err(io::Error::other("the edited copy does not build"));
    }
    let mut what = BTreeMap::new();
    for edit in bugs.bug {
        let known: &mut String = what.entry(edit.name).or_default();
        known.push_str(&edit.what);
    }
    Ok((root.join("target/planted/target/release/simulate-quorum"), what))
}

fn read_all(root: &Path, folder: &Path, files: &mut BTreeMap<PathBuf, String>) -> io::Result<()> {
    for entry in fs::read_dir(root.join(folder))? {
        let entry = entry?;
        let path = folder.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            read_all(root, &path, files)?;
        } else if path.extension().is_some_and(|extension| extension == "rs" || extension == "toml") {
            files.insert(path.clone(), fs::read_to_string(root.join(&path))?);
        }
    }
    Ok(())
}

fn edit_file(files: &mut BTreeMap<PathBuf, String>, edit: &Edit) -> io::Result<()> {
    let Edit { name, file, find, replace, .. } = edit;
    let missing = || io::Error::other(format!("{name}: there is no {}", file.display()));
    let text = files.get_mut(file).ok_or_else(missing)?;
    let places = text.matches(find.as_str()).count();
    if places != 1 {
        let detail = format!("{name}: what it replaces stands {places} times in {}", file.display());
        return Err(io::Error::other(detail));
    }
    *text = text.replacen(find, replace, 1);
    Ok(())
}

/// The workspace of the copied crates alone.
fn workspace(text: &str) -> io::Result<String> {
    let mut table: toml::Table = text.parse().map_err(io::Error::other)?;
    let members = CRATES.iter().map(|name| toml::Value::from(format!("ownership/{name}")));
    let members = toml::Value::Array(members.collect());
    if let Some(toml::Value::Table(workspace)) = table.get_mut("workspace") {
        workspace.insert("members".into(), members);
        workspace.remove("default-members");
    }
    // The build is most of the time that this takes.
    let quick: toml::Table = "[release]\nopt-level = 1\ndebug = false\n".parse().map_err(io::Error::other)?;
    table.insert("profile".into(), toml::Value::Table(quick));
    Ok(table.to_string())
}

/// Writes only what is different, so that nothing is built again for nothing.
fn write_if_new(path: &Path, text: &str) -> io::Result<()> {
    let is_lock = path.extension().is_some_and(|extension| extension == "lock") && path.exists();
    if is_lock || fs::read_to_string(path).is_ok_and(|old| old == text) {
        return Ok(());
    }
    fs::create_dir_all(path.parent().unwrap_or(path))?;
    fs::write(path, text)
}

/// Runs seeds for each bug. True when all are found, and nothing is found where there is none.
fn hunt(options: &Options, binary: &Path, bugs: &BTreeMap<String, String>) -> io::Result<bool> {
    let control = run(binary, None, options.control)?;
    let mut all_found = !control.found;
    if control.found {
        say(&format!("without any bug: {}", control.says));
    }
    let wanted = |name: &&String| options.bugs.is_empty() || options.bugs.contains(name);
    let mut found = 0;
    for name in bugs.keys().filter(wanted) {
        let hunted = run(binary, Some(name), options.seeds)?;
        found += u64::from(hunted.found);
        all_found &= hunted.found;
        let word = if hunted.found { "found " } else { "MISSED" };
        say(&format!("{word} {name:40} {:4} seeds {:5.1} s  {}", hunted.seeds, hunted.seconds, hunted.says));
    }
    say(&format!(
        "{found} of {} planted bugs found; without any, {} seeds passed",
        bugs.keys().filter(wanted).count(),
        control.seeds
    ));
    Ok(all_found)
}

struct Hunted {
    found: bool,
    seeds: u64,
    seconds: f64,
    says: String,
}

fn run(binary: &Path, bug: Option<&str>, seeds: u64) -> io::Result<Hunted> {
    let started = Instant::now();
    let mut command = Command::new(binary);
    command.args(["--until-failure", "--seeds", &seeds.to_string()]).env_remove("PLANTED_BUG");
    command.envs(bug.map(|name| ("PLANTED_BUG", name)));
    let output = command.output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let failed = text.lines().find_map(|line| line.split_once(" FAILED: "));
    let summary = text.lines().find(|line| line.contains(" simulated hours"));
    let ran = summary.and_then(|line| line.split_once(" seeds, ")).and_then(|(count, _)| count.parse().ok());
    Ok(Hunted {
        found: failed.is_some() && !output.status.success(),
        seeds: ran.unwrap_or(0),
        seconds: started.elapsed().as_secs_f64(),
        says: failed.map_or_else(String::new, |(seed, check)| format!("{seed}: {check}")),
    })
}

/// Says a line; nobody may be listening.
fn say(line: &str) {
    drop(writeln!(stdout(), "{line}"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bug_still_fits_into_the_sources_and_says_what_it_is() {
        let (files, bugs) = edited(&root().unwrap()).unwrap();
        let mut what: BTreeMap<&str, bool> = BTreeMap::new();
        for edit in &bugs.bug {
            *what.entry(&edit.name).or_default() |= !edit.what.is_empty();
            assert!(edit.replace.contains(&edit.name) || edit.replace.contains("pub fn"), "{} is never off", edit.name);
        }
        assert!(what.len() >= 10 && what.values().all(|says| *says), "{what:?}");
        assert!(files.values().any(|text| text.contains(concat!("planted::", "on("))));
    }

    #[test]
    fn the_sources_that_are_shipped_hold_none() {
        let mut files = BTreeMap::new();
        for name in CRATES {
            read_all(&root().unwrap(), &Path::new("ownership").join(name), &mut files).unwrap();
        }
        let planted = concat!("planted::", "on(");
        let here = |(path, text): &(&PathBuf, &String)| !path.ends_with("bugs.toml") && text.contains(planted);
        let found: Vec<_> = files.iter().filter(here).map(|(path, _)| path).collect();
        assert_eq!(found, Vec::<&PathBuf>::new());
    }
}
