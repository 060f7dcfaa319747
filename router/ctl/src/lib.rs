//! `ownerserve ctl`: reads and changes a cluster over the operator API, or its files while it is down.
//!
//! Everything except file commands uses the operator API. Exit codes: 0 success, 1 refused, 2 usage error, 3 not all
//! endpoints answered and nothing was changed, 4 outcome unknown, 5 there are alarms, 6 done at some endpoints or
//! with some sessions only, 7 nothing could be compared.

mod alarms;
mod args;
mod client;
mod cluster;
mod drain;
mod endpoints;
mod error;
mod explain;
mod filters;
mod links;
mod lists;
mod output;
mod purge;
mod resources;
mod routing;
mod snapshot;
mod table;
mod watch;
mod writes;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use clap::{Args, Subcommand};
use vocabulary::TimeSpan;

pub use self::table::{aligned, field_list, row};

pub use self::args::WorkerArg;
use self::client::{ClientTimeouts, OperatorClient, OperatorClientOptions, READ_TIMEOUT};
use self::error::CtlError;
use self::output::print_text;
pub use self::output::{OutputFormat, bar, pretty};
use self::resources::{
    ArtifactCommand, GroupCommand, IntentCommand, LeaseCommand, OwnerCommand, ReplicaCommand, SessionCommand,
    TenantCommand, WorkerCommand,
};
use vocabulary::Secret;
use vocabulary::flags;

/// Reads and changes a cluster over the operator API, and reads its snapshots.
#[derive(Clone, Debug, Args)]
pub struct CtlArgs {
    #[command(subcommand)]
    command: CtlCommand,
    /// Output format.
    #[arg(short, long, value_enum, global = true, default_value_t)]
    output: OutputFormat,
    /// Address of a router's operator API; may be repeated. The first that can be reached is asked. `cluster status`,
    /// `cluster verify`, `member list`, `alarms list`, `routing`, `link`, `tenant purge` and `session purge` go to all.
    #[arg(
        long = "endpoint",
        global = true,
        env = "OWNERSERVE_ENDPOINT",
        value_delimiter = ',',
        default_value = "http://127.0.0.1:9464",
        value_name = "URL"
    )]
    endpoints: Vec<String>,
    /// Bearer token; the environment and a file hide it from other users.
    #[arg(long, global = true, env = "OWNERSERVE_TOKEN", hide_env_values = true)]
    token: Option<String>,
    /// File with nothing but the token.
    #[arg(long, global = true, value_name = "FILE", conflicts_with = "token")]
    token_file: Option<PathBuf>,
    /// PEM file with the CA certificates to trust, instead of the operating system's.
    #[arg(long, global = true, env = "OWNERSERVE_CACERT", value_name = "FILE")]
    cacert: Option<PathBuf>,
    /// Sends the token over http:// to other hosts, too, although others on the network can read it.
    #[arg(long, global = true, env = "OWNERSERVE_INSECURE_PLAIN_HTTP")]
    insecure_plain_http: bool,
    /// Timeout until an answer begins, as 500ms, 5s or 2m. When left out, 5s; for `session migrate`, `replica create` and
    /// `snapshot`, which transfer blocks and files, 5m; for `member` 45s.
    #[arg(long, global = true, value_name = "DURATION", value_parser = flags::duration)]
    timeout: Option<TimeSpan>,
}

#[derive(Clone, Debug, Subcommand)]
enum CtlCommand {
    /// Owners of sealed prefixes.
    #[command(subcommand)]
    Owner(OwnerCommand),
    /// Leases: the lives of workers as the ledger holds them.
    #[command(subcommand)]
    Lease(LeaseCommand),
    /// Sessions: conversations of clients.
    #[command(subcommand)]
    Session(SessionCommand),
    /// Artifacts: sealed ranges of blocks.
    #[command(subcommand)]
    Artifact(ArtifactCommand),
    /// Replicas: read-only copies of artifacts.
    #[command(subcommand)]
    Replica(ReplicaCommand),
    /// Intents: steps in flight.
    #[command(subcommand)]
    Intent(IntentCommand),
    /// Groups of artifacts.
    #[command(subcommand)]
    Group(GroupCommand),
    /// Tenants and their quotas.
    #[command(subcommand)]
    Tenant(TenantCommand),
    /// Workers as routers see them.
    #[command(subcommand)]
    Worker(WorkerCommand),
    /// Decisions of the router at the first endpoint: why steps were served as they were.
    #[command(subcommand)]
    Decision(routing::DecisionCommand),
    /// Routing settings, at every endpoint: who decides where steps go.
    #[command(subcommand)]
    Routing(routing::RoutingCommand),
    /// Links between workers that transfer checks disabled, at every endpoint.
    #[command(subcommand)]
    Link(links::LinkCommand),
    /// Members: the nodes of the cluster.
    #[command(subcommand)]
    Member(cluster::MemberCommand),
    /// The cluster as a whole: status, comparison, changes, feature level.
    #[command(subcommand)]
    Cluster(cluster::ClusterCommand),
    /// Alarms: everything that needs an operator's attention.
    #[command(subcommand)]
    Alarms(alarms::AlarmsCommand),
    /// Snapshots of the ledger, as files.
    #[command(subcommand)]
    Snapshot(snapshot::SnapshotCommand),
    /// Prints a script that completes commands in a shell.
    Completion {
        /// The shell.
        shell: clap_complete::Shell,
    },
}

impl CtlCommand {
    /// Default timeouts of the command.
    fn timeouts(&self) -> ClientTimeouts {
        ClientTimeouts::for_command(match self {
            Self::Session(command) if command.moves_blocks() => TimeSpan::seconds(300),
            Self::Replica(command) if command.moves_blocks() => TimeSpan::seconds(300),
            Self::Snapshot(_) => TimeSpan::seconds(300),
            // The leader itself takes up to 30 s for these.
            Self::Member(_) | Self::Cluster(cluster::ClusterCommand::RaiseFeatureLevel { .. }) => TimeSpan::seconds(45),
            Self::Session(command) if command.is_purge() => PURGE_TIMEOUT,
            Self::Tenant(command) if command.is_purge() => PURGE_TIMEOUT,
            _ => READ_TIMEOUT,
        })
    }
}

/// A purge waits for Redis.
const PURGE_TIMEOUT: TimeSpan = TimeSpan::seconds(65);

/// Runs the command. `definition` is that of the whole command line, from which completion scripts are made.
pub async fn run(args: &CtlArgs, definition: clap::Command) -> ExitCode {
    match run_command(args, definition).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => args.output.fail((error.exit_code(), error.error_code()), error.reason(), &error.to_string()),
    }
}

/// Reports a usage error of clap in the requested output format; `None` if that is the table, which clap prints
/// itself.
pub fn report_usage_error(words: impl Iterator<Item = OsString>, error: &clap::Error) -> Option<ExitCode> {
    let words: Vec<String> = words.map(|word| word.to_string_lossy().into_owned()).collect();
    let is_json =
        |pair: &[String]| matches!(pair, [flag, value] if (flag == "-o" || flag == "--output") && value == "json");
    let is_one = |word: &String| ["-ojson", "-o=json", "--output=json"].contains(&word.as_str());
    let wants_json =
        words.get(1).is_some_and(|word| word == "ctl") && (words.windows(2).any(is_json) || words.iter().any(is_one));
    let text = error.to_string();
    let message = text.strip_prefix("error: ").unwrap_or(&text).trim();
    (wants_json && error.use_stderr()).then(|| OutputFormat::Json.fail((2, "usage"), None, message))
}

fn client(args: &CtlArgs) -> Result<OperatorClient, CtlError> {
    if args.timeout.is_some_and(|timeout| timeout.0.is_zero()) {
        let what = "--timeout: accepted is more than 0, for example 500ms, 5s or 2m";
        return Err(CtlError::Usage(what.into()));
    }
    let token = match (&args.token, &args.token_file) {
        (Some(token), _) => Some(token.clone()),
        (None, None) => None,
        (None, Some(path)) => {
            let file = |source| CtlError::File { path: path.display().to_string(), source };
            Some(std::fs::read_to_string(path).map_err(file)?.trim().to_owned())
        }
    };
    let has_token = token.is_some();
    let client = OperatorClient::new(OperatorClientOptions {
        endpoints: args.endpoints.clone(),
        token: token.as_deref().map(Secret::from),
        timeouts: args.timeout.map_or_else(|| args.command.timeouts(), ClientTimeouts::with_timeout),
        cacert: args.cacert.clone(),
    })?;
    if has_token && !args.insecure_plain_http {
        client.check_token_confidentiality()?;
    }
    Ok(client)
}

async fn run_command(args: &CtlArgs, definition: clap::Command) -> Result<(), CtlError> {
    let (client, output) = (client(args)?, args.output);
    match &args.command {
        CtlCommand::Owner(command) => command.run(&client, output).await,
        CtlCommand::Lease(command) => command.run(&client, output).await,
        CtlCommand::Session(command) => command.run(&client, output).await,
        CtlCommand::Artifact(command) => command.run(&client, output).await,
        CtlCommand::Replica(command) => command.run(&client, output).await,
        CtlCommand::Intent(command) => command.run(&client, output).await,
        CtlCommand::Group(command) => command.run(&client, output).await,
        CtlCommand::Tenant(command) => command.run(&client, output).await,
        CtlCommand::Worker(command) => command.run(&client, output).await,
        CtlCommand::Decision(command) => command.run(&client, output).await,
        CtlCommand::Routing(command) => command.run(&client, output).await,
        CtlCommand::Link(command) => command.run(&client, output).await,
        CtlCommand::Member(command) => command.run(&client, output).await,
        CtlCommand::Cluster(command) => command.run(&client, output).await,
        CtlCommand::Alarms(command) => command.run(&client, output).await,
        CtlCommand::Snapshot(command) => snapshot::run(&client, command, output).await,
        CtlCommand::Completion { shell } => {
            print_completions(*shell, definition);
            Ok(())
        }
    }
}

/// Prints the completion script for a shell.
fn print_completions(shell: clap_complete::Shell, mut definition: clap::Command) {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut definition, "ownerserve", &mut script);
    print_text(&String::from_utf8_lossy(&script));
}

/// Returns the wall clock, in milliseconds since 1970.
fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn help_lists_the_commands_that_query_every_endpoint() {
        let ctl = CtlArgs::augment_args(clap::Command::new("ctl"));
        let endpoint = ctl.get_arguments().find(|argument| argument.get_long() == Some("endpoint")).unwrap();
        let help = endpoint.get_help().unwrap().to_string();
        for command in ["cluster status", "cluster verify", "member list", "alarms list", "routing", "link"] {
            assert!(help.contains(&format!("`{command}`")), "{help}");
        }
    }
}
