//! Runs of the copy's simulation with one bug switched on, or none, and what they came to.

use std::path::Path;
use std::process::Command;

use crate::bugs::{Finding, LIST};
use crate::{Result, at};

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Ended {
    Passed,
    Found(Finding),
    /// The simulation itself ended, and says why if it can.
    Crashed(String),
}

/// Runs the first so many seeds until one fails, on all cores.
pub(crate) fn hunt(binary: &Path, bug: Option<&str>, seeds: u64) -> Result<Ended> {
    run(binary, bug, &["--until-failure", "--seeds", &seeds.to_string()])
}

/// Runs one seed on one core.
pub(crate) fn replay(binary: &Path, bug: &str, seed: u64) -> Result<Ended> {
    run(binary, Some(bug), &["--threads", "1", "--seeds", "1", "--from", &seed.to_string()])
}

fn run(binary: &Path, bug: Option<&str>, seeds: &[&str]) -> Result<Ended> {
    let mut command = Command::new(binary);
    command.args(seeds);
    command.env_remove("PLANTED_BUG").envs(bug.map(|name| ("PLANTED_BUG", name)));
    let output = command.output().map_err(at(binary))?;
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

/// How a seed ends otherwise than is known of it; none where it fails by the check that it is known for.
pub(crate) fn changed(known: &Finding, ended: &Ended) -> Option<String> {
    let Finding { seed, check } = known;
    match ended {
        Ended::Found(found) if found == known => None,
        Ended::Found(found) => Some(format!("seed {seed} fails by \"{}\", no longer by \"{check}\"", found.check)),
        Ended::Passed => Some(format!("seed {seed} passes; it failed by \"{check}\"")),
        Ended::Crashed(why) => Some(format!("seed {seed} ends without a verdict ({why}); it failed by \"{check}\"")),
    }
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
        assert_eq!(changed(&known(), &Ended::Found(known())), None);
        let says = |ended| changed(&known(), &ended).unwrap();
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
