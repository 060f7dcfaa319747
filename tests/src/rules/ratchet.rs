//! STYLE.md's measures against `tests/ratchet.toml`, the list of what is above them. An entry may shrink or go; nothing may come or grow.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Measures, Unreadable, measure, root, sources};

const FILE: &str = "tests/ratchet.toml";
const HEAD: &str = "# What is above the measures of STYLE.md today. `just fix` lowers entries; nothing raises them but `just ratchet`,\n\
                    # whose diff someone has to defend.\n\n";

/// A measure and how much of it is fine.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, Debug)]
#[serde(rename_all = "snake_case")]
pub enum Goal {
    /// 400 lines in a file without its tests.
    FileLines,
    /// 60 lines in a function.
    FunctionLines,
    /// 4 arguments.
    Arguments,
    /// 12 fields.
    StructFields,
    /// No `bool` parameter.
    BoolParameters,
    /// No name that says nothing.
    VagueNames,
    /// No error that is a string.
    StringErrors,
}

impl Goal {
    /// The most that needs no entry.
    pub fn limit(self) -> usize {
        match self {
            Goal::FileLines => 400,
            Goal::FunctionLines => 60,
            Goal::Arguments => 4,
            Goal::StructFields => 12,
            Goal::BoolParameters | Goal::VagueNames | Goal::StringErrors => 0,
        }
    }
}

/// Something above a goal.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Offence {
    /// Of which measure.
    pub goal: Goal,
    /// `path` or `path::item`.
    pub place: String,
    /// How much it is.
    pub size: usize,
}

/// The committed list.
#[derive(Default, PartialEq, Serialize, Deserialize, Debug)]
#[serde(transparent)]
pub struct Ratchet {
    entries: BTreeMap<Goal, BTreeMap<String, usize>>,
}

impl Ratchet {
    /// The list as committed; none is an empty one.
    pub fn read() -> Result<Ratchet, Unreadable> {
        let text = std::fs::read_to_string(root().join(FILE)).map_err(Unreadable::io(FILE))?;
        toml::from_str(&text).map_err(|error| Unreadable::Form { what: FILE.into(), why: error.to_string() })
    }

    /// A list that just holds these.
    pub fn of(offences: &[Offence]) -> Ratchet {
        let mut ratchet = Ratchet::default();
        for Offence { goal, place, size } in offences {
            let size_there = ratchet.entries.entry(*goal).or_default().entry(place.clone()).or_default();
            *size_there = (*size_there).max(*size);
        }
        ratchet
    }

    /// Those that are new or have grown.
    pub fn broken_by<'a>(&self, offences: &'a [Offence]) -> Vec<&'a Offence> {
        offences.iter().filter(|offence| offence.size > self.allowed(offence.goal, &offence.place)).collect()
    }

    /// This list, lowered to what is still there.
    pub fn tightened(&self, offences: &[Offence]) -> Ratchet {
        let present = Ratchet::of(offences);
        let mut entries = present.entries;
        for (goal, places) in &mut entries {
            places.retain(|place, _| self.entries.get(goal).is_some_and(|known| known.contains_key(place)));
            for (place, size) in places {
                *size = (*size).min(self.allowed(*goal, place));
            }
        }
        entries.retain(|_, places| !places.is_empty());
        Ratchet { entries }
    }

    /// Puts it in place of the committed list.
    pub fn write(&self) -> Result<(), Unreadable> {
        let text =
            toml::to_string(self).map_err(|error| Unreadable::Form { what: FILE.into(), why: error.to_string() })?;
        std::fs::write(root().join(FILE), format!("{HEAD}{text}")).map_err(Unreadable::io(FILE))
    }

    fn allowed(&self, goal: Goal, place: &str) -> usize {
        self.entries.get(&goal).and_then(|places| places.get(place)).copied().unwrap_or(goal.limit())
    }
}

/// Everything above a goal in the sources as they are.
pub fn offenders() -> Result<Vec<Offence>, Unreadable> {
    let mut found = Vec::new();
    for source in sources()? {
        found.extend(in_file(&source.path, &measure(&source)?));
    }
    found.retain(|offence| offence.size > offence.goal.limit());
    found.sort();
    Ok(found)
}

fn in_file(path: &str, measures: &Measures) -> Vec<Offence> {
    let at = |goal, item: &str, size| Offence { goal, place: format!("{path}::{item}"), size };
    let mut found = vec![Offence { goal: Goal::FileLines, place: path.to_owned(), size: measures.lines }];
    for function in &measures.functions {
        found.push(at(Goal::FunctionLines, &function.name, function.lines));
        found.push(at(Goal::Arguments, &function.name, function.arguments));
        found.push(at(Goal::BoolParameters, &function.name, function.bools));
    }
    found.extend(measures.structs.iter().map(|(name, fields)| at(Goal::StructFields, name, *fields)));
    found.extend(measures.vague_names.iter().map(|name| at(Goal::VagueNames, name, 1)));
    found.push(Offence { goal: Goal::StringErrors, place: path.to_owned(), size: measures.string_errors });
    found
}
