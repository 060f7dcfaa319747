//! The command line: few flags; everything else is `--config FILE` and `--set path=value`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, CommandFactory as _, Parser, Subcommand};
use planner::Policy;

use crate::config::{Config, Overrides};
use crate::file_modes::config_file_warning;
use crate::what_if_command::PolicyError;
use crate::{ctl, demo, reference, serve, sim_command, simulate_command, trace_command, validate_sim, what_if_command};
use proxy::telemetry;

/// KV-aware proxy for LLM workers: knows who owns each session's prefix, and serves its next step where that is cheapest.
#[derive(Debug, Parser)]
#[command(name = "ownerserve", version, about, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(subcommand)]
    command: CliCommand,
}

#[derive(Debug, Subcommand)]
enum CliCommand {
    /// Serves the OpenAI API in front of workers.
    Serve(ServeArgs),
    SimWorker(sim_command::SimArgs),
    Demo(demo::DemoArgs),
    Ctl(Box<ctl::CtlArgs>),
    Trace(trace_command::TraceArgs),
    Simulate(Box<simulate_command::SimulateArgs>),
    ValidateSim(validate_sim::ValidateSimArgs),
    WhatIf(Box<what_if_command::WhatIfArgs>),
    /// Writes the reference pages of the book into a folder.
    #[command(hide = true)]
    Reference {
        /// Folder of the pages; exists.
        #[arg(value_name = "DIR")]
        folder: PathBuf,
    },
}

/// What `serve` takes.
#[derive(Clone, Debug, Default, Args)]
struct ServeArgs {
    /// Address for clients [default: 127.0.0.1:8080].
    #[arg(long, value_name = "ADDR")]
    listen: Option<String>,
    /// Address for operators: API and /metrics [default: 127.0.0.1:9464].
    #[arg(long, value_name = "ADDR")]
    operator_listen: Option<String>,
    /// Engine, followed by #prefill or #decode if it is not a hybrid; may be repeated.
    #[arg(long = "worker", value_name = "URL[#ROLE]")]
    workers: Vec<String>,
    /// Configuration file (TOML).
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Sets one value of the configuration, for example routing.mode=shadow; overrides the file and may be repeated.
    #[arg(long = "set", value_name = "PATH=VALUE")]
    settings: Vec<String>,
    /// Data directory of the durable ledger, created if missing [default: ./ownerserve-data].
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Address for the other nodes of the cluster. Without it, this node keeps the ledger alone.
    #[arg(long, value_name = "ADDR")]
    cluster_listen: Option<String>,
    /// Members of the cluster to join if the data directory is new.
    #[arg(long, value_name = "ADDR[,ADDR]")]
    join: Option<String>,
    /// Ends when standard input closes.
    #[arg(long, hide = true)]
    exit_with_parent: bool,
}

impl ServeArgs {
    fn overrides(&self) -> Overrides {
        let quoted = |path: &str, value: String| format!("{path}={}", toml::Value::String(value));
        let mut settings = Vec::new();
        settings.extend(self.listen.clone().map(|value| quoted("proxy.listen", value)));
        settings.extend(self.operator_listen.clone().map(|value| quoted("operator.listen", value)));
        let folder = self.data_dir.as_ref().map(|folder| folder.to_string_lossy().into_owned());
        settings.extend(folder.map(|value| quoted("ledger.data_dir", value)));
        settings.extend(self.cluster_listen.clone().map(|value| quoted("cluster.listen", value)));
        settings.extend(self.join.clone().map(|value| quoted("cluster.join", value)));
        settings.extend(self.settings.iter().cloned());
        Overrides { settings, workers: self.workers.clone() }
    }
}

/// Returns the definition of the command line.
pub(crate) fn command() -> clap::Command {
    Cli::command()
}

/// Runs the command given on the command line.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return ctl::report_usage_error(std::env::args_os(), &error).unwrap_or_else(|| error.exit()),
    };
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return report_failure(&error),
    };
    match cli.command {
        CliCommand::Serve(args) => runtime.block_on(run_serve(&args)),
        CliCommand::SimWorker(args) => runtime.block_on(run_sim_worker(&args)),
        CliCommand::Demo(options) => runtime.block_on(demo::run(options)),
        CliCommand::Ctl(args) => runtime.block_on(ctl::run(&args, command())),
        CliCommand::Trace(args) => ended(trace_command::run(&args)),
        CliCommand::Simulate(args) => ended(simulate_command::run(&args)),
        CliCommand::ValidateSim(args) => ended(runtime.block_on(validate_sim::run(&args))),
        CliCommand::WhatIf(args) => ended(what_if_command::run(&args, read_policy)),
        CliCommand::Reference { folder } => ended(reference::write(&folder, command())),
    }
}

async fn run_serve(args: &ServeArgs) -> ExitCode {
    if args.exit_with_parent {
        demo::exit_with_parent();
    }
    telemetry::init_log();
    let config = match Config::load(args.config.as_deref(), &args.overrides()) {
        Ok(config) => config,
        Err(error) => return report_failure(&error),
    };
    let in_file =
        args.config.as_deref().and_then(|file| Some((Config::load(Some(file), &Overrides::default()).ok()?, file)));
    let warning = in_file.and_then(|(config, file)| config_file_warning(&config, file));
    warning.iter().for_each(|warning| tracing::warn!("{warning}"));
    match serve::run(config).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => report_failure(&error),
    }
}

async fn run_sim_worker(args: &sim_command::SimArgs) -> ExitCode {
    if args.exit_with_parent {
        demo::exit_with_parent();
    }
    telemetry::init_log();
    match sim_command::run(args).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => report_failure(&error),
    }
}

fn read_policy(base: &Policy, file: Option<&Path>, settings: &[String]) -> Result<Policy, PolicyError> {
    Config::policy(base, file, settings).map_err(|error| PolicyError(error.into()))
}

fn ended<E: std::error::Error>(result: Result<(), E>) -> ExitCode {
    result.map_or_else(|error| report_failure(&error), |()| ExitCode::SUCCESS)
}

/// Prints an error to the terminal; the only text that bypasses the log, since it explains why there is none.
#[allow(clippy::print_stderr, reason = "the log may not exist yet, and people look here first")]
pub(crate) fn report_failure(error: &dyn std::error::Error) -> ExitCode {
    eprintln!("ownerserve: {error}");
    ExitCode::FAILURE
}

#[cfg(test)]
mod tests {
    use clap::error::ErrorKind;
    use vocabulary::{ArtifactGroupId, ArtifactId, PrefixId, RequestId, SessionId};

    use super::*;

    fn serve_config(args: &[&str]) -> Config {
        let cli = Cli::try_parse_from(["ownerserve", "serve"].iter().chain(args)).unwrap();
        let CliCommand::Serve(args) = cli.command else { panic!("serve was asked for") };
        Config::load(None, &args.overrides()).unwrap()
    }

    #[test]
    fn serve_flags_override_configuration_settings() {
        let config = serve_config(&[
            "--listen=127.0.0.1:1",
            "--operator-listen",
            "[::1]:2",
            "--worker=http://a:1#prefill",
            "--worker=http://b:1",
            "--data-dir=/tmp/with space",
            "--cluster-listen=127.0.0.1:3",
            "--join=a:1,b:2",
            "--set",
            "routing.mode=shadow",
        ]);
        assert_eq!((config.proxy.listen.port(), config.operator.listen.to_string().as_str()), (1, "[::1]:2"));
        assert_eq!(config.ledger.data_dir, PathBuf::from("/tmp/with space"));
        assert_eq!(config.workers.len(), 2);
        let peering = config.cluster.peering();
        assert_eq!((peering.listen.as_deref(), peering.join.len()), (Some("127.0.0.1:3"), 2));
        assert_eq!(config.routing.mode, vocabulary::RoutingMode::Shadow);
    }

    #[test]
    fn settings_of_what_if_change_the_recorded_policy() {
        let policy = Policy { interference_weight: 3.0, ..Policy::default() };
        let read = |setting: &str| read_policy(&policy, None, &[setting.to_owned()]);
        let changed = read("planner.memory_cost_per_mib=7us").unwrap();
        assert_eq!((changed.interference_weight, changed.memory_cost_per_mib), (3.0, 7.0));
        assert!(read("planner.lamda=7").unwrap_err().to_string().contains("lamda"));
    }

    /// Parses a command line of the fixture up to `--help`, which is shown only if all words before it are accepted.
    fn accepts(line: &str) -> bool {
        let word = |word: &str| match word {
            "SESSION" => SessionId(1).to_string(),
            "ARTIFACT" => ArtifactId(1).to_string(),
            "PREFIX" => PrefixId(1).to_string(),
            "GROUP" => ArtifactGroupId(1).to_string(),
            "REQUEST" => RequestId(1).to_string(),
            "WORKER" => "http://127.0.0.1:1".to_owned(),
            other => other.to_owned(),
        };
        let words = ["ownerserve"].into_iter().chain(line.split_whitespace()).chain(["--help"]).map(word);
        Cli::try_parse_from(words).unwrap_err().kind() == ErrorKind::DisplayHelp
    }

    #[test]
    fn every_command_line_parses_by_its_new_words_only() {
        for line in include_str!("cli/renamed.txt").lines() {
            let (old, new) = line.split_once('|').unwrap();
            assert!(accepts(new), "{new}");
            assert!(!accepts(old), "{old}");
        }
    }

    #[test]
    fn unknown_verb_is_reported_by_name() {
        let error = Cli::try_parse_from(["ownerserve", "ctl", "hashkv"]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidSubcommand);
        assert!(error.to_string().contains("unrecognized subcommand 'hashkv'"), "{error}");
    }

    #[test]
    fn command_line_definition_is_valid() {
        Cli::command().debug_assert();
    }
}
