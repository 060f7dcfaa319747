//! Runs the copy's simulation with at most one bug enabled, and parses the result.

use std::path::Path;
use std::process::Command;

use crate::bugs::{BUGS_FILE, Finding};
use crate::{Result, io_error_at};

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum TrialEnd {
    Passed,
    Failed(Finding),
    /// The simulation itself ended; the text is its reason, if known.
    Crashed(String),
}

/// Runs the first `seeds` seeds until one fails, on all cores.
pub(crate) fn hunt(binary: &Path, bug: Option<&str>, seeds: u64) -> Result<TrialEnd> {
    run(binary, bug, &["--until-failure", "--seeds", &seeds.to_string()])
}

/// Runs one seed on one core.
pub(crate) fn replay(binary: &Path, bug: &str, seed: u64) -> Result<TrialEnd> {
    run(binary, Some(bug), &["--threads", "1", "--seeds", "1", "--from", &seed.to_string()])
}

fn run(binary: &Path, bug: Option<&str>, seeds: &[&str]) -> Result<TrialEnd> {
    let mut command = Command::new(binary);
    command.args(seeds);
    command.env_remove("PLANTED_BUG").envs(bug.map(|name| ("PLANTED_BUG", name)));
    let output = command.output().map_err(io_error_at(binary))?;
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(match (text.lines().find_map(parse_finding), output.status.success()) {
        (_, true) => TrialEnd::Passed,
        (Some(finding), false) => TrialEnd::Failed(finding),
        (None, false) => TrialEnd::Crashed(format!("{}: {}", output.status, last_line(&text, &output.stderr))),
    })
}

/// Parses the output line of a failed seed.
fn parse_finding(line: &str) -> Option<Finding> {
    let (seed, check) = line.strip_prefix("seed ")?.split_once(" FAILED: ")?;
    Some(Finding { seed: seed.parse().ok()?, check: check.to_owned() })
}

fn last_line(stdout: &str, stderr: &[u8]) -> String {
    let stderr = String::from_utf8_lossy(stderr);
    stderr.lines().last().or_else(|| stdout.lines().last()).unwrap_or("it said nothing").to_owned()
}

/// Returns how a seed's result differs from the known one; `None` if it fails with the known check.
pub(crate) fn deviation(finding: &Finding, ended: &TrialEnd) -> Option<String> {
    let Finding { seed, check } = finding;
    match ended {
        TrialEnd::Failed(found) if found == finding => None,
        TrialEnd::Failed(found) => Some(format!("seed {seed} fails by \"{}\", no longer by \"{check}\"", found.check)),
        TrialEnd::Passed => Some(format!("seed {seed} passes; it failed by \"{check}\"")),
        TrialEnd::Crashed(why) => Some(format!("seed {seed} ends without a verdict ({why}); it failed by \"{check}\"")),
    }
}

/// Returns what to do about a bug whose seed has changed, after a search for it.
pub(crate) fn advice(bug: &str, hunted: &TrialEnd, seeds: u64) -> String {
    match hunted {
        TrialEnd::Failed(finding) => {
            format!("if this check is about the bug, put this beside its `what` in {BUGS_FILE}:\n{}", finding.lines())
        }
        TrialEnd::Passed => format!("none of {seeds} seeds finds it; `just planted --hunt {bug}` tries more"),
        TrialEnd::Crashed(why) => {
            format!("the hunt ended without a verdict ({why}); correct its `replace` in {BUGS_FILE}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known() -> Finding {
        Finding { seed: 7, check: "a view never goes back".into() }
    }

    #[test]
    fn only_a_failed_seed_line_parses_as_a_finding() {
        assert_eq!(parse_finding("seed 7 FAILED: a view never goes back"), Some(known()));
        assert_eq!(parse_finding("seed 7: everything held"), None);
        assert_eq!(parse_finding("  node 1 went from 5 to 4"), None);
    }

    #[test]
    fn only_the_known_check_at_the_known_seed_counts_as_found() {
        assert_eq!(deviation(&known(), &TrialEnd::Failed(known())), None);
        let says = |ended| deviation(&known(), &ended).unwrap();
        let other = TrialEnd::Failed(Finding { check: "nothing panics".into(), ..known() });
        assert_eq!(says(other), "seed 7 fails by \"nothing panics\", no longer by \"a view never goes back\"");
        assert_eq!(says(TrialEnd::Passed), "seed 7 passes; it failed by \"a view never goes back\"");
        assert!(
            says(TrialEnd::Crashed("exit status: 1: no".into())).contains("without a verdict (exit status: 1: no)")
        );
    }

    #[test]
    fn advice_after_a_hunt_names_what_to_write_or_run() {
        assert!(advice("b", &TrialEnd::Failed(known()), 50).ends_with("seed = 7\ncheck = \"a view never goes back\""));
        assert!(advice("b", &TrialEnd::Passed, 50).ends_with("`just planted --hunt b` tries more"));
        assert!(advice("b", &TrialEnd::Crashed("signal".into()), 50).contains(BUGS_FILE));
    }
}
