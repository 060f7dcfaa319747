//! Runs of the copy's simulation with one bug switched on, or none, and what they came to.

use std::path::Path;
use std::process::Command;

use crate::bugs::{Finding, LIST};
use crate::error::PlantError;

/// Seeds to run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Seeds {
    /// One, on one core.
    One(u64),
    /// The first so many until one fails, on all cores.
    First(u64),
}

/// How a run ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Ended {
    /// Every seed held.
    Passed,
    /// A check failed.
    Found(Finding),
    /// The simulation itself ended, and says why if it can.
    Crashed(String),
}

/// Runs seeds.
pub(crate) fn run(binary: &Path, bug: Option<&str>, seeds: Seeds) -> Result<Ended, PlantError> {
    let mut command = Command::new(binary);
    match seeds {
        Seeds::One(seed) => command.args(["--threads", "1", "--seeds", "1", "--from", &seed.to_string()]),
        Seeds::First(count) => command.args(["--until-failure", "--seeds", &count.to_string()]),
    };
    command.env_remove("PLANTED_BUG").envs(bug.map(|name| ("PLANTED_BUG", name)));
    let output = command.output().map_err(PlantError::at(binary))?;
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(match (text.lines().find_map(finding), output.status.success()) {
        (_, true) => Ended::Passed,
        (Some(finding), false) => Ended::Found(finding),
        (None, false) => Ended::Crashed(format!("{}: {}", output.status, last_line(&text, &output.stderr))),
    })
}

/// What a line says of a seed that failed.
fn finding(line: &str) -> Option<Finding> {
    let (seed, check) = line.strip_prefix("seed ")?.split_once(" FAILED: ")?;
    Some(Finding { seed: seed.parse().ok()?, check: check.to_owned() })
}

fn last_line(stdout: &str, stderr: &[u8]) -> String {
    let stderr = String::from_utf8_lossy(stderr);
    stderr.lines().last().or_else(|| stdout.lines().last()).unwrap_or("it said nothing").to_owned()
}

/// What the known seed of a bug still proves.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Verdict {
    /// It fails by the check that it is known for.
    Found,
    /// It does not, or there is none; in these words.
    Changed(String),
}

/// Compares how a seed ended with what is known of it.
pub(crate) fn verdict(known: &Finding, ended: &Ended) -> Verdict {
    let Finding { seed, check } = known;
    Verdict::Changed(match ended {
        Ended::Found(found) if found == known => return Verdict::Found,
        Ended::Found(found) => format!("seed {seed} fails by \"{}\", no longer by \"{check}\"", found.check),
        Ended::Passed => format!("seed {seed} passes; it failed by \"{check}\""),
        Ended::Crashed(why) => format!("seed {seed} ends without a verdict ({why}); it failed by \"{check}\""),
    })
}

/// What to do about a bug whose seed has changed, once a hunt for it has ended.
pub(crate) fn advice(bug: &str, hunted: &Ended, seeds: u64) -> String {
    match hunted {
        Ended::Found(finding) => {
            format!("if this check is about the bug, put this beside its `what` in {LIST}:\n{}", finding.lines())
        }
        Ended::Passed => format!("none of {seeds} seeds finds it; `just planted --hunt {bug}` tries more"),
        Ended::Crashed(why) => format!("the hunt ended without a verdict ({why}); correct its `replace` in {LIST}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known() -> Finding {
        Finding { seed: 7, check: "a view never goes back".into() }
    }

    #[test]
    fn a_line_about_a_failed_seed_is_read_and_no_other() {
        assert_eq!(finding("seed 7 FAILED: a view never goes back"), Some(known()));
        assert_eq!(finding("seed 7: everything held"), None);
        assert_eq!(finding("  node 1 went from 5 to 4"), None);
    }

    #[test]
    fn only_the_known_check_at_the_known_seed_counts_as_found() {
        assert_eq!(verdict(&known(), &Ended::Found(known())), Verdict::Found);
        let says = |ended| match verdict(&known(), &ended) {
            Verdict::Changed(says) => says,
            Verdict::Found => String::new(),
        };
        let other = Ended::Found(Finding { check: "nothing panics".into(), ..known() });
        assert_eq!(says(other), "seed 7 fails by \"nothing panics\", no longer by \"a view never goes back\"");
        assert_eq!(says(Ended::Passed), "seed 7 passes; it failed by \"a view never goes back\"");
        assert!(says(Ended::Crashed("exit status: 1: no".into())).contains("without a verdict (exit status: 1: no)"));
    }

    #[test]
    fn the_advice_after_a_hunt_is_what_to_write_or_to_run() {
        assert!(advice("b", &Ended::Found(known()), 50).ends_with("seed = 7\ncheck = \"a view never goes back\""));
        assert!(advice("b", &Ended::Passed, 50).ends_with("`just planted --hunt b` tries more"));
        assert!(advice("b", &Ended::Crashed("signal".into()), 50).contains(LIST));
    }
}
