//! Command line of the nemesis.

use std::path::PathBuf;
use std::time::Duration;

use crate::NemesisError;
use crate::faults::Nemesis;
use crate::load::LoadAmount;
use crate::testbed::RunLength;

/// Options of a run.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    /// Each nemesis once, or repeatedly.
    pub(crate) pace: RunLength,
    /// Seed of the fault choices.
    pub(crate) seed: u64,
    /// Duration of a long run, in minutes.
    pub(crate) minutes: u64,
    /// Only these nemeses, in this order; empty means all.
    pub(crate) only: Vec<Nemesis>,
    /// File for the result as JSON.
    pub(crate) json: Option<PathBuf>,
    /// Binary under test.
    pub(crate) binary: PathBuf,
    /// Folder for logs, histories and data directories.
    pub(crate) folder: PathBuf,
    /// Number of clients and their rate.
    pub(crate) amount: LoadAmount,
    /// Duration of worker leases.
    pub(crate) lease: Duration,
    /// Number of voters: 1, 3 or 5.
    pub(crate) voters: u8,
}

impl Options {
    /// Parses the command line.
    pub(crate) fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Options, NemesisError> {
        let own = std::env::current_exe().map_err(NemesisError::system("find this program"))?;
        let target = own.ancestors().nth(2).map_or_else(std::env::temp_dir, std::path::Path::to_owned);
        let mut options = Options {
            pace: RunLength::Long,
            seed: seed(),
            minutes: 20,
            only: Vec::new(),
            json: None,
            binary: own.with_file_name("ownerserve"),
            folder: target.join("nemesis"),
            // So many clients that the rate holds when replies are slow: concurrent writes share a flush.
            amount: LoadAmount { clients: 128, rate: 1600.0 },
            lease: Duration::from_secs(15),
            voters: 5,
        };
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().ok_or_else(|| NemesisError::usage(format!("{argument} needs a value")));
            match argument.as_str() {
                "--quick" => {
                    options.pace = RunLength::Quick;
                    options.lease = Duration::from_secs(5);
                    options.voters = 3;
                }
                "--seed" => options.seed = number(&argument, &value()?)?,
                "--minutes" => options.minutes = number(&argument, &value()?)?,
                "--clients" => options.amount.clients = number(&argument, &value()?)?.clamp(2, 512) as usize,
                "--rate" => options.amount.rate = number(&argument, &value()?)?.clamp(1, 100_000) as f64,
                "--voters" => options.voters = voters(&value()?)?,
                "--only" => options.only.push(nemesis(&value()?)?),
                "-o" | "--json" => options.json = Some(value()?.into()),
                "--bin" => options.binary = value()?.into(),
                "--folder" => options.folder = value()?.into(),
                _ => return Err(NemesisError::usage(format!("unknown option {argument}"))),
            }
        }
        Ok(options)
    }
}

fn number(argument: &str, text: &str) -> Result<u64, NemesisError> {
    text.parse().map_err(|_| NemesisError::usage(format!("{argument}: {text} is no number")))
}

fn voters(text: &str) -> Result<u8, NemesisError> {
    let sound = text.parse().ok().filter(|voters| [1, 3, 5].contains(voters));
    sound.ok_or_else(|| NemesisError::usage("--voters: accepted is 1, 3 or 5"))
}

fn nemesis(name: &str) -> Result<Nemesis, NemesisError> {
    let names = || Nemesis::ALL.map(Nemesis::name).join(", ");
    Nemesis::of_name(name).ok_or_else(|| NemesisError::usage(format!("no nemesis {name}; there are {}", names())))
}

/// Returns a new seed for every run; it is printed, so that a run can be repeated.
fn seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id()) % 1_000_000
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Options, NemesisError> {
        Options::parse(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn a_quick_run_has_a_short_lease_and_the_given_seed() {
        let options = parse("--quick --seed 7 --only pause --only kill-leader -o out.json").unwrap();
        assert_eq!((options.voters, parse("--quick --voters 5").unwrap().voters, parse("").unwrap().voters), (3, 5, 5));
        assert!(parse("--voters 2").is_err());
        assert_eq!((options.pace, options.seed, options.lease.as_secs()), (RunLength::Quick, 7, 5));
        assert_eq!(options.only, [Nemesis::Pause, Nemesis::KillLeader]);
    }

    #[test]
    fn unknown_options_are_refused_with_the_accepted_values() {
        let error = parse("--only earthquake").unwrap_err().to_string();
        assert!(error.contains("earthquake") && error.contains("flapping-partition"), "{error}");
        assert!(parse("--seed").is_err() && parse("--seed x").is_err() && parse("--fast").is_err());
    }
}
