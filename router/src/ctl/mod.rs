//! `ownerserve ctl`: what an operator asks of a cluster, or of its files while it is down.
//!
//! Everything but files goes over the operator API. Exit codes: 0 done, 1 refused, 2 not understood, 3 not all answered
//! and nothing was changed, 4 the outcome is not known, 5 there are alarms.

mod args;
mod client;
mod cluster;
mod lists;
mod snapshot;
mod steering;
mod table;
mod watch;
mod writes;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, CommandFactory, Subcommand, ValueEnum};
use http::Method;
use serde::Serialize;
use serde_json::json;
use vocabulary::{ArtifactId, PrefixId, SessionId};

use self::args::WorkerArg;
use self::client::{Client, ClientOptions, CtlError};
use self::lists::{FilterArgs, List, PageArgs, show_one, show_tree};
use crate::auth::Secret;
use crate::config::units::Span;

/// Looks into a cluster and changes it, over the operator API, and into its files.
#[derive(Clone, Debug, Args)]
pub(crate) struct CtlArgs {
    #[command(subcommand)]
    command: CtlCommand,
    /// How answers are printed.
    #[arg(short, long, value_enum, global = true, default_value_t)]
    output: Output,
    /// An operators' address; may be repeated. The first that can be reached is asked, `status` and `hashkv` ask all.
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
    /// Longest wait for an answer to begin, as 500ms, 5s or 2m. A migration takes as long as its blocks need.
    #[arg(long, global = true, value_name = "SPAN", default_value = "5m")]
    timeout: Span,
}

/// A list or, with an id, one of it.
#[derive(Clone, Debug, Args)]
struct ListArgs<T: Clone + Send + Sync + std::str::FromStr<Err: std::error::Error + Send + Sync> + 'static> {
    /// Only this one.
    id: Option<T>,
    #[command(flatten)]
    filter: FilterArgs,
    #[command(flatten)]
    page: PageArgs,
}

#[derive(Clone, Debug, Args)]
struct SessionArgs {
    #[command(flatten)]
    list: ListArgs<SessionId>,
    /// The fork tree of the session.
    #[arg(long, requires = "id")]
    tree: bool,
}

#[derive(Clone, Debug, Args)]
struct PlainArgs {
    #[command(flatten)]
    filter: FilterArgs,
    #[command(flatten)]
    page: PageArgs,
}

#[derive(Clone, Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
struct WorkersArgs {
    #[command(subcommand)]
    command: Option<WorkersCommand>,
    #[command(flatten)]
    list: ListArgs<WorkerArg>,
}

#[derive(Clone, Debug, Subcommand)]
enum WorkersCommand {
    /// Lets a worker take no new sessions, at every router.
    Drain {
        /// The worker, by id or URL.
        worker: WorkerArg,
    },
    /// Takes a worker back into service.
    Undrain {
        /// The worker, by id or URL.
        worker: WorkerArg,
    },
    /// Ends the ownership of a worker that is gone for good, before its lease does.
    Retire {
        /// The worker, by id or URL.
        worker: WorkerArg,
    },
}

impl WorkersCommand {
    fn request(&self) -> writes::Request {
        let draining = |worker: &WorkerArg, draining: bool| {
            cluster::free(Method::PUT, format!("workers/{worker}/draining"), json!({"draining": draining}))
        };
        match self {
            Self::Drain { worker } => draining(worker, true),
            Self::Undrain { worker } => draining(worker, false),
            Self::Retire { worker } => cluster::free(Method::DELETE, format!("workers/{worker}"), json!({})),
        }
    }
}

#[derive(Clone, Debug, Subcommand)]
enum CtlCommand {
    /// Who has sealed prefixes.
    Owners(ListArgs<PrefixId>),
    /// The lives of workers as the ledger holds them.
    Leases(ListArgs<WorkerArg>),
    /// Conversations.
    Sessions(SessionArgs),
    /// Sealed ranges of blocks.
    Artifacts(ListArgs<ArtifactId>),
    /// Read-only copies.
    Replicas(PlainArgs),
    /// Steps on their way.
    Intents(PlainArgs),
    /// Groups of artifacts.
    Groups(PageArgs),
    /// Tenants, what they have and may have.
    Tenants(PageArgs),
    /// Workers as routers see them.
    Workers(WorkersArgs),
    #[command(flatten)]
    Write(writes::WriteCommand),
    /// Why the newest steps were served as they were, at the first endpoint; with a request's id one of them.
    Decisions(steering::DecisionArgs),
    /// Who decides where steps go, at every endpoint; with a mode or a share it is set there until its next start.
    Mode(steering::ModeArgs),
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

/// How answers are printed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, ValueEnum)]
pub(crate) enum Output {
    /// For people.
    #[default]
    Table,
    /// For programs.
    Json,
}

impl Output {
    /// Prints an answer: as JSON, or as these names and values.
    pub(crate) fn print(self, answer: &impl Serialize, rows: &[(&str, String)]) {
        match self {
            Output::Json => {
                say(&format!("{}\n", serde_json::to_string_pretty(answer).expect("an answer encodes")));
            }
            Output::Table => {
                let rows: Vec<_> = rows.iter().map(|(name, value)| vec![(*name).to_owned(), value.clone()]).collect();
                say(&table::aligned(&rows));
            }
        }
    }
}

/// Prints an answer. A reader that has left, as `head` does, has seen enough.
fn say(text: &str) {
    use std::io::Write as _;
    let _ = std::io::stdout().write_all(text.as_bytes());
}

/// Says something beside the answer.
fn note(text: &str) {
    use std::io::Write as _;
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// Runs one command.
pub(crate) async fn run(args: &CtlArgs) -> ExitCode {
    match command(args).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            note(&format!("ownerserve: {error}"));
            ExitCode::from(error.code())
        }
    }
}

fn client(args: &CtlArgs) -> Result<Client, CtlError> {
    let token = match (&args.token, &args.token_file) {
        (Some(token), _) => Some(token.clone()),
        (None, None) => None,
        (None, Some(path)) => {
            let file = |source| CtlError::File { path: path.display().to_string(), source };
            Some(std::fs::read_to_string(path).map_err(file)?.trim().to_owned())
        }
    };
    Client::new(ClientOptions {
        endpoints: args.endpoints.clone(),
        token: token.as_deref().map(Secret::from),
        timeout: args.timeout,
        cacert: args.cacert.clone(),
    })
}

async fn command(args: &CtlArgs) -> Result<(), CtlError> {
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
        CtlCommand::Groups(page) => lists::GROUPS.show(&client, (&FilterArgs::default(), page), output).await,
        CtlCommand::Tenants(page) => lists::TENANTS.show(&client, (&FilterArgs::default(), page), output).await,
        CtlCommand::Workers(WorkersArgs { command: Some(command), .. }) => {
            writes::run(&client, command.request(), output).await
        }
        CtlCommand::Workers(args) => list_or_one(&client, (&lists::WORKERS, "worker"), (&args.list, output)).await,
        CtlCommand::Write(command) => writes::run(&client, command.request(), output).await,
        CtlCommand::Decisions(args) => steering::decisions(&client, args, output).await,
        CtlCommand::Mode(args) => steering::mode(&client, args, output).await,
        CtlCommand::Member(command) => cluster::member(&client, command, output).await,
        CtlCommand::MoveLeader { node } => {
            writes::run(&client, cluster::free(Method::POST, "cluster/leader", json!({"node": node})), output).await
        }
        CtlCommand::RaiseLevel { level } => {
            writes::run(&client, cluster::free(Method::PUT, "cluster/level", json!({"level": level})), output).await
        }
        CtlCommand::Watch(args) => watch::watch(&client, args, output).await,
        CtlCommand::Status => cluster::status(&client, output).await,
        CtlCommand::Hashkv => cluster::hashkv(&client, output).await,
        CtlCommand::Alarm => cluster::alarms(&client, output).await,
        CtlCommand::Snapshot(command) => snapshot::run(&client, command, output).await,
        CtlCommand::Completion { shell } => {
            complete(*shell);
            Ok(())
        }
    }
}

async fn list_or_one<T>(
    client: &Client,
    (list, one): (&List, &str),
    (args, output): (&ListArgs<T>, Output),
) -> Result<(), CtlError>
where
    T: Clone + Send + Sync + std::fmt::Display + std::str::FromStr<Err: std::error::Error + Send + Sync>,
{
    match &args.id {
        Some(id) => show_one(client, (&format!("{}/{id}", list.name), &args.page), (one, output)).await,
        None => list.show(client, (&args.filter, &args.page), output).await,
    }
}

/// Writes the script for a shell.
fn complete(shell: clap_complete::Shell) {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut crate::cli::Cli::command(), "ownerserve", &mut script);
    say(&String::from_utf8_lossy(&script));
}
