//! The list of bugs: the description of each, the edits that plant it, and the seed that finds it. Every bug needs a
//! description.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Deserialize;

use crate::Result;

/// Path of the list from the repository's root.
pub(crate) const BUGS_FILE: &str = "ownership/simulation/planted/bugs.toml";

#[derive(Debug)]
pub(crate) struct BugList {
    /// Edits of all bugs, in the order of the list.
    pub(crate) edits: Vec<SourceEdit>,
    /// What finds each bug, by the bug's name; `None` while no seed is known.
    pub(crate) findings: BTreeMap<String, Option<Finding>>,
}

/// A seed, and the check that fails there.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Finding {
    pub(crate) seed: u64,
    /// Name of the check, as the simulation prints it.
    pub(crate) check: String,
}

impl Finding {
    /// Returns the lines that represent it in the list.
    pub(crate) fn lines(&self) -> String {
        format!("seed = {}\ncheck = {}", self.seed, toml::Value::from(self.check.as_str()))
    }
}

#[derive(Deserialize)]
struct BugsFile {
    bug: Vec<SourceEdit>,
}

/// One edit of one file. If a bug needs several, one of them has the description and the finding.
#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub(crate) struct SourceEdit {
    pub(crate) name: String,
    what: Option<String>,
    seed: Option<u64>,
    check: Option<String>,
    pub(crate) file: PathBuf,
    pub(crate) find: String,
    pub(crate) replace: String,
}

pub(crate) fn read(text: &str) -> Result<BugList> {
    let BugsFile { bug: edits } =
        toml::from_str(text).map_err(|error| format!("{BUGS_FILE} cannot be read: {error}"))?;
    let mut known = BTreeMap::new();
    for SourceEdit { name, what, seed, check, .. } in &edits {
        let finding = match (what, *seed, check) {
            (None, None, None) => continue,
            (None, ..) => Err("`seed` and `check` stand at an edit without `what`; move them beside it in"),
            (Some(_), None, None) => Ok(None),
            (Some(_), Some(seed), Some(check)) => Ok(Some(Finding { seed, check: check.clone() })),
            (Some(_), ..) => Err("`seed` and `check` belong together; add the other one, or remove both, in"),
        };
        let finding = finding.map_err(|why| format!("{name}: {why} {BUGS_FILE}"))?;
        if known.insert(name.clone(), finding).is_some() {
            return Err(format!("{name}: two edits say what it is; leave `what` at one of them in {BUGS_FILE}").into());
        }
    }
    match edits.iter().find(|edit| !known.contains_key(&edit.name)) {
        Some(SourceEdit { name, .. }) => {
            Err(format!("{name}: no edit says what it is; give one of them `what` in {BUGS_FILE}").into())
        }
        None => Ok(BugList { edits, findings: known }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edit(name: &str, says: &str) -> String {
        format!("[[bug]]\nname = \"{name}\"\n{says}\nfile = \"a.rs\"\nfind = \"a\"\nreplace = \"b\"\n")
    }

    const COMPLETE_FIELDS: &str = "what = \"w\"\nseed = 7\ncheck = \"nothing \\\"panics\\\"\"";

    #[test]
    fn a_bug_of_several_edits_takes_the_seed_of_the_edit_that_describes_it() {
        let text = [edit("two", ""), edit("two", COMPLETE_FIELDS), edit("new", "what = \"w\"")].concat();
        let bugs = read(&text).unwrap();
        let finding = Finding { seed: 7, check: "nothing \"panics\"".into() };
        assert_eq!(bugs.edits.len(), 3);
        assert_eq!(bugs.findings, BTreeMap::from([("two".into(), Some(finding)), ("new".into(), None)]));
    }

    #[test]
    fn a_finding_round_trips_through_its_lines() {
        let finding = Finding { seed: 12, check: "a \"b\" <= c".into() };
        let bugs = read(&edit("one", &format!("what = \"w\"\n{}", finding.lines()))).unwrap();
        assert_eq!(bugs.findings["one"], Some(finding));
    }

    #[test]
    fn an_incomplete_bug_is_refused_by_name() {
        let error = |text: &str| read(text).unwrap_err().to_string();
        assert!(error(&edit("bare", "")).starts_with("bare: no edit says what it is"));
        assert!(error(&edit("half", "what = \"w\"\nseed = 1")).starts_with("half: `seed` and `check`"));
        assert!(error(&edit("lost", "seed = 1\ncheck = \"c\"")).starts_with("lost: `seed` and `check`"));
        assert!(
            error(&[edit("twice", COMPLETE_FIELDS), edit("twice", COMPLETE_FIELDS)].concat())
                .starts_with("twice: two edits")
        );
        assert!(error("[[bug]]\nname = 1").contains(BUGS_FILE));
    }
}
