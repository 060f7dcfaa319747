//! `ownerserve ctl`: reads and changes a cluster over the operator API, or its files while it is down.
//!
//! Everything except file commands uses the operator API. Exit codes: 0 success, 1 refused, 2 usage error, 3 not all
//! endpoints answered and nothing was changed, 4 outcome unknown, 5 there are alarms, 6 done at some endpoints or
//! with some sessions only, 7 nothing could be compared.

mod alarms;
mod args;
mod barred_links;
mod client;
mod cluster;
mod drain;
mod endpoints;
mod error;
mod explain;
mod filters;
mod forget;
mod lists;
mod output;
mod routing;
mod snapshot;
mod table;
mod watch;
mod writes;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, CommandFactory, Subcommand};
use serde_json::json;
use vocabulary::{ArtifactId, PrefixId, RequestId, SessionId};

pub(crate) use self::table::{aligned, field_list, row};

pub(crate) use self::args::WorkerArg;
use self::client::{ClientTimeouts, OperatorClient, OperatorClientOptions, READ_TIMEOUT};
use self::error::CtlError;
use self::filters::{
    ArtifactFilterArgs, IntentFilterArgs, LeaseFilterArgs, ListFilter, ReplicaFilterArgs, SessionFilterArgs,
    TenantFilterArgs, WorkerFilterArgs,
};
use self::lists::{ListSpec, PageArgs, show_one, show_tree};
use self::output::print_text;
pub(crate) use self::output::{OutputFormat, pretty};
use self::writes::{WorkerOperand, delete, post, put};
use crate::auth::Secret;
use crate::config::units::TimeSpan;

/// Looks into a cluster and changes it, over the operator API, and into its files.
#[derive(Clone, Debug, Args)]
pub(crate) struct CtlArgs {
    #[command(subcommand)]
    command: CtlCommand,
    /// How answers are printed.
    #[arg(short, long, value_enum, global = true, default_value_t)]
    output: OutputFormat,
    /// An operators' address; may be repeated. The first that can be reached is asked. All are by `status`, `hashkv`,
    /// `member list`, `mode` (which sets all of them, too) and `alarm` (about the cluster; about workers the first).
    #[arg(
        long = "endpoint",
        global = true,
        env = "OWNERSERVE_ENDPOINT",
        value_delimiter = ',',
        default_value = "http://127.0.0.1:9464",
        value_name = "URL"
    )]
    endpoints: Vec<String>,
    /// A bearer token; in the environment or in a file others do not see it.
    #[arg(long, global = true, env = "OWNERSERVE_TOKEN", hide_env_values = true)]
    token: Option<String>,
    /// A file with nothing but the token.
    #[arg(long, global = true, value_name = "FILE", conflicts_with = "token")]
    token_file: Option<PathBuf>,
    /// A PEM file with the authorities to trust behind https, in place of the operating system's.
    #[arg(long, global = true, env = "OWNERSERVE_CACERT", value_name = "FILE")]
    cacert: Option<PathBuf>,
    /// Sends the token over http:// to other hosts than this one, too, where anybody on the way can read it.
    #[arg(long, global = true, env = "OWNERSERVE_INSECURE_PLAIN_HTTP")]
    insecure_plain_http: bool,
    /// Longest wait for an answer to begin, as 500ms, 5s or 2m. When left out 5s; for `migrate`, `replicate` and `snapshot`,
    /// which take as long as their blocks and bytes need, 5m; for a change of the members 45s.
    #[arg(long, global = true, value_name = "SPAN")]
    timeout: Option<TimeSpan>,
}

/// A list or, with an id, one of it.
#[derive(Clone, Debug, Args)]
struct ListArgs<T: Clone + Send + Sync + std::str::FromStr<Err: std::error::Error + Send + Sync> + 'static, F: Args> {
    /// Only this one.
    id: Option<T>,
    #[command(flatten)]
    filter: F,
    #[command(flatten)]
    page: PageArgs,
}

#[derive(Clone, Debug, Args)]
struct SessionArgs {
    #[command(flatten)]
    list: ListArgs<SessionId, SessionFilterArgs>,
    /// The fork tree of the session.
    #[arg(long, requires = "id")]
    tree: bool,
}

#[derive(Clone, Debug, Args)]
struct FilteredListArgs<F: Args> {
    #[command(flatten)]
    filter: F,
    #[command(flatten)]
    page: PageArgs,
}

#[derive(Clone, Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
struct WorkersArgs {
    #[command(subcommand)]
    command: Option<WorkersCommand>,
    #[command(flatten)]
    list: ListArgs<WorkerArg, WorkerFilterArgs>,
}

#[derive(Clone, Debug, Subcommand)]
enum WorkersCommand {
    /// Lets a worker take no new sessions, at every router, and has its sessions moved; `ctl drain` shows how far that is.
    Drain(WorkerOperand),
    /// Takes a worker back into service.
    Undrain(WorkerOperand),
    /// Lists a worker at this router for a time; repeated within it, it stays.
    Register {
        /// Its URL, with #prefill, #decode or #hybrid behind it where it is not a hybrid.
        url: String,
        /// How long, as 30s or 5m.
        #[arg(long, value_name = "SPAN")]
        ttl: Option<TimeSpan>,
        /// A model that it serves; may be repeated. Asked from it when left out.
        #[arg(long = "model")]
        models: Vec<String>,
    },
    /// Ends a registration; what the worker began goes on.
    Deregister(WorkerOperand),
    /// Ends the ownership of a worker that is gone for good, before its lease does.
    Retire(WorkerOperand),
}

impl WorkersCommand {
    fn request(&self) -> writes::WriteRequest {
        let draining = |worker: WorkerArg, draining: bool| {
            put(format!("workers/{worker}/draining"), json!({"draining": draining}))
        };
        match self {
            Self::Drain(WorkerOperand { worker }) => draining(*worker, true),
            Self::Undrain(WorkerOperand { worker }) => draining(*worker, false),
            Self::Register { url, ttl, models } => {
                let mut body = json!({"url": url, "models": models});
                if let Some(ttl) = ttl {
                    body["ttl_ms"] = json!(ttl.0.as_millis() as u64);
                }
                post("registrations", body)
            }
            Self::Deregister(WorkerOperand { worker }) => delete(format!("registrations/{worker}")),
            Self::Retire(WorkerOperand { worker }) => delete(format!("workers/{worker}")),
        }
    }
}

#[derive(Clone, Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
struct GroupsArgs {
    #[command(subcommand)]
    command: Option<GroupsCommand>,
    #[command(flatten)]
    page: PageArgs,
}

#[derive(Clone, Debug, Subcommand)]
enum GroupsCommand {
    /// Makes up a group, puts these artifacts into it, and prints its id.
    #[command(alias = "create")]
    New {
        /// The artifacts; without any the group is listed once `group ARTIFACT GROUP` has put one into it.
        artifacts: Vec<ArtifactId>,
    },
}

#[derive(Clone, Debug, Subcommand)]
enum CtlCommand {
    /// Who has sealed prefixes.
    Owners(ListArgs<PrefixId, ArtifactFilterArgs>),
    /// The lives of workers as the ledger holds them.
    Leases(ListArgs<WorkerArg, LeaseFilterArgs>),
    /// Conversations.
    Sessions(SessionArgs),
    /// Sealed ranges of blocks.
    Artifacts(ListArgs<ArtifactId, ArtifactFilterArgs>),
    /// Read-only copies.
    Replicas(FilteredListArgs<ReplicaFilterArgs>),
    /// Steps on their way.
    Intents(FilteredListArgs<IntentFilterArgs>),
    /// Groups of artifacts.
    Groups(GroupsArgs),
    /// Tenants, what they have and may have.
    Tenants(FilteredListArgs<TenantFilterArgs>),
    /// Workers as routers see them.
    Workers(WorkersArgs),
    /// Moves a worker's sessions away before it stops, with a bar; with --rolling, of all workers in turn.
    Drain(drain::DrainArgs),
    #[command(flatten)]
    Write(writes::WriteCommand),
    /// Why steps were served as they were, at the first endpoint; with a request's id one of them, field by field.
    Decisions(routing::DecisionArgs),
    /// Why one step was served as it was, at the first endpoint: what was known, every way with its price, what came of it.
    Explain {
        /// The id that its client saw in x-request-id.
        request: RequestId,
    },
    /// Who decides where steps go, at every endpoint; with a mode or a share it is set there until its next start.
    Mode(routing::ModeArgs),
    /// Links over which nothing moves, because KV came as something else over them, at every endpoint.
    #[command(args_conflicts_with_subcommands = true)]
    Links {
        #[command(subcommand)]
        command: Option<barred_links::LinksCommand>,
    },
    /// Forgets what is kept of people's words, at every endpoint.
    #[command(subcommand)]
    Forget(forget::ForgetCommand),
    /// The nodes of the cluster.
    #[command(subcommand)]
    Member(cluster::MemberCommand),
    /// Makes another voter lead.
    MoveLeader {
        /// Its node id.
        node: u64,
    },
    /// Raises the cluster's feature level; there is no way back.
    RaiseLevel {
        /// The level.
        #[arg(value_parser = clap::value_parser!(u32).range(1..))]
        level: u32,
    },
    /// Changes as they happen.
    Watch(watch::WatchArgs),
    /// Every endpoint's view of the cluster.
    Status,
    /// Every endpoint's digest of its state; at one revision they are equal.
    Hashkv,
    /// What is not as it should be.
    Alarm,
    /// Snapshots of the ledger, as files.
    #[command(subcommand)]
    Snapshot(snapshot::SnapshotCommand),
    /// A script that lets a shell complete commands.
    Completion {
        /// The shell.
        shell: clap_complete::Shell,
    },
}

impl CtlCommand {
    /// Default timeouts of the command.
    fn timeouts(&self) -> ClientTimeouts {
        ClientTimeouts::for_command(match self {
            Self::Write(write) if write.moves_blocks() => TimeSpan::seconds(300),
            Self::Snapshot(_) => TimeSpan::seconds(300),
            // The leader itself takes up to 30 s for these.
            Self::Member(_) | Self::MoveLeader { .. } | Self::RaiseLevel { .. } => TimeSpan::seconds(45),
            CtlCommand::Forget(_) => TimeSpan::seconds(65),
            _ => READ_TIMEOUT,
        })
    }
}

pub(crate) async fn run(args: &CtlArgs) -> ExitCode {
    match run_command(args).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => args.output.fail((error.exit_code(), error.error_code()), error.cause(), &error.to_string()),
    }
}

/// Reports a usage error of clap in the requested output format; `None` if that is the table, which clap prints
/// itself.
pub(crate) fn report_usage_error(words: impl Iterator<Item = OsString>, error: &clap::Error) -> Option<ExitCode> {
    let words: Vec<String> = words.map(|word| word.to_string_lossy().into_owned()).collect();
    let is_json =
        |pair: &[String]| matches!(pair, [flag, value] if (flag == "-o" || flag == "--output") && value == "json");
    let is_one = |word: &String| ["-ojson", "-o=json", "--output=json"].contains(&word.as_str());
    let wanted =
        words.get(1).is_some_and(|word| word == "ctl") && (words.windows(2).any(is_json) || words.iter().any(is_one));
    let told = error.to_string();
    let told = told.strip_prefix("error: ").unwrap_or(&told).trim();
    (wanted && error.use_stderr()).then(|| OutputFormat::Json.fail((2, "usage"), None, told))
}

fn client(args: &CtlArgs) -> Result<OperatorClient, CtlError> {
    if args.timeout.is_some_and(|timeout| timeout.0.is_zero()) {
        let what = "--timeout: with 0 nothing could ever be answered; accepted is 1ms and more, as 500ms, 5s or 2m";
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

async fn run_command(args: &CtlArgs) -> Result<(), CtlError> {
    let (client, output) = (client(args)?, args.output);
    match &args.command {
        CtlCommand::Owners(list) => list_or_one(&client, (&lists::OWNERS, "owners"), (list, output)).await,
        CtlCommand::Leases(list) => list_or_one(&client, (&lists::LEASES, "lease"), (list, output)).await,
        CtlCommand::Sessions(SessionArgs { list: ListArgs { id: Some(id), .. }, tree: true }) => {
            show_tree(&client, *id, output).await
        }
        CtlCommand::Sessions(args) => list_or_one(&client, (&lists::SESSIONS, "session"), (&args.list, output)).await,
        CtlCommand::Artifacts(list) => list_or_one(&client, (&lists::ARTIFACTS, "artifact"), (list, output)).await,
        CtlCommand::Replicas(list) => lists::REPLICAS.show(&client, (&list.filter, &list.page), output).await,
        CtlCommand::Intents(list) => lists::INTENTS.show(&client, (&list.filter, &list.page), output).await,
        CtlCommand::Groups(GroupsArgs { command: Some(GroupsCommand::New { artifacts }), .. }) => {
            writes::run(&client, writes::new_group(artifacts), output).await
        }
        CtlCommand::Groups(GroupsArgs { command: None, page }) => {
            lists::GROUPS.show(&client, (&(), page), output).await
        }
        CtlCommand::Tenants(list) => lists::TENANTS.show(&client, (&list.filter, &list.page), output).await,
        CtlCommand::Workers(WorkersArgs { command: Some(command), .. }) => {
            writes::run(&client, command.request(), output).await
        }
        CtlCommand::Workers(args) => list_or_one(&client, (&lists::WORKERS, "worker"), (&args.list, output)).await,
        CtlCommand::Drain(args) => drain::drain(&client, args, output).await,
        CtlCommand::Write(command) => writes::run(&client, command.request(), output).await,
        CtlCommand::Decisions(args) => routing::decisions(&client, args, output).await,
        CtlCommand::Explain { request } => explain::explain(&client, *request, output).await,
        CtlCommand::Mode(args) => routing::mode(&client, args, output).await,
        CtlCommand::Links { command } => barred_links::links(&client, command.as_ref(), output).await,
        CtlCommand::Forget(command) => forget::forget(&client, command, output).await,
        CtlCommand::Member(command) => cluster::member(&client, command, output).await,
        CtlCommand::MoveLeader { node } => {
            writes::run(&client, post("cluster/leader", json!({"node": node})), output).await
        }
        CtlCommand::RaiseLevel { level } => {
            writes::run(&client, put("cluster/level", json!({"level": level})), output).await
        }
        CtlCommand::Watch(args) => watch::watch(&client, args, output).await,
        CtlCommand::Status => cluster::status(&client, output).await,
        CtlCommand::Hashkv => cluster::verify(&client, output).await,
        CtlCommand::Alarm => alarms::alarms(&client, output).await,
        CtlCommand::Snapshot(command) => snapshot::run(&client, command, output).await,
        CtlCommand::Completion { shell } => {
            print_completions(*shell);
            Ok(())
        }
    }
}

async fn list_or_one<T, F: ListFilter>(
    client: &OperatorClient,
    (list, one): (&ListSpec, &str),
    (args, output): (&ListArgs<T, F>, OutputFormat),
) -> Result<(), CtlError>
where
    T: Clone + Send + Sync + std::fmt::Display + std::str::FromStr<Err: std::error::Error + Send + Sync>,
{
    match &args.id {
        Some(id) => show_one(client, (&format!("{}/{id}", list.name), &args.page), (one, output)).await,
        None => list.show(client, (&args.filter, &args.page), output).await,
    }
}

/// Prints the completion script for a shell.
fn print_completions(shell: clap_complete::Shell) {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut crate::cli::Cli::command(), "ownerserve", &mut script);
    print_text(&String::from_utf8_lossy(&script));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn help_lists_the_commands_that_query_every_endpoint() {
        let ctl = CtlArgs::augment_args(clap::Command::new("ctl"));
        let endpoint = ctl.get_arguments().find(|argument| argument.get_long() == Some("endpoint")).unwrap();
        let help = endpoint.get_help().unwrap().to_string();
        for command in ["status", "hashkv", "member list", "mode", "alarm"] {
            assert!(help.contains(&format!("`{command}`")), "{help}");
        }
    }
}
