//! `ownerserve sim-worker`: a simulated engine that speaks the small model's text, or another model's.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use prefix::PrefixError;
use serde::de::DeserializeOwned;
use serde::de::value::{Error as ValueError, StringDeserializer};
use vocabulary::WorkerRole;
use workers_shim::engine_api::KvConnector;
use workers_shim::sim::{
    EngineProfile, EventFault, EventOptions, SimError, SimOptions, SimWorker, TransferFault, TransferOptions,
};

use crate::serve::wait_for_signal;

mod codec;

pub use codec::ModelCodec;

/// Runs a simulated engine: vLLM on the wire, no model inside.
#[derive(Clone, Debug, Args)]
pub struct SimArgs {
    /// Where it serves HTTP; port 0 takes any free one, which the log tells. Given several times, it is as many engines.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:8000")]
    listen: Vec<SocketAddr>,
    /// What it says it is for: it computes prompts for others, generates answers, or does both.
    #[arg(long, default_value = "hybrid", value_parser = one_of::<WorkerRole>(&["prefill", "decode", "hybrid"]))]
    role: WorkerRole,
    /// The name under which it serves its model.
    #[arg(long, value_name = "NAME", default_value = "tiny")]
    model: String,
    /// A LoRA adapter on top of it, served under this name; its KV blocks are its own. May be given several times.
    #[arg(long = "adapter", value_name = "NAME")]
    adapters: Vec<String>,
    /// Model folder with tokenizer.json and chat template, in place of the small built-in one.
    #[arg(long, value_name = "DIR")]
    text: Option<PathBuf>,
    /// Speeds and capacities (TOML), as in configs/profiles.
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    /// How many times faster than the modelled engine it runs.
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0)]
    speed_up: f64,
    /// Where it publishes KV events [default: any free port]; told by GET /kv_event_sources.
    #[arg(long, value_name = "ADDR")]
    events_listen: Option<SocketAddr>,
    /// How many messages of KV events it keeps for whoever missed them.
    #[arg(long, value_name = "MESSAGES", default_value_t = EventOptions::default().buffer)]
    events_kept: usize,
    /// What goes wrong with events on their way, for tests: duplicate=N, gap=N.
    #[arg(long, value_name = "FAULTS")]
    events_fault: Option<EventFault>,
    #[command(flatten)]
    handing: KvTransferArgs,
    /// Keeps all prompts in one cache, whatever cache_salt they come with, for tests.
    #[arg(long)]
    ignore_salts: bool,
    /// Ends when standard input closes.
    #[arg(long, hide = true)]
    pub(crate) exit_with_parent: bool,
}

// How a simulated engine hands KV over. Not a doc comment: as one it would be the help of whole `sim-worker`.
#[derive(Clone, Debug, Args)]
struct KvTransferArgs {
    /// What goes wrong with KV on its way to other workers, for tests: corrupt=N damages one of N reads, and tells nobody.
    #[arg(long, value_name = "FAULT")]
    transfer_fault: Option<TransferFault>,
    /// How it hands KV over, and whose metrics it shows: OpenAI's API alone; vLLM with NIXL, or the same in its bidirectional
    /// mode; vLLM with Mooncake; SGLang, whose prefill and decode workers answer nothing else.
    #[arg(long, default_value = "nixl", value_parser = one_of::<KvConnector>(&["plain", "nixl", "bidirectional", "mooncake", "sglang"]))]
    dialect: KvConnector,
    /// Where its bootstrap server listens [default: any free port]; SGLang's GET /server_info tells it.
    #[arg(long, value_name = "ADDR")]
    bootstrap_listen: Option<SocketAddr>,
    /// How long one leg of a transfer waits for the other.
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    meet_within: u64,
}

/// One of these words, as configuration has it.
fn one_of<T>(words: &'static [&'static str]) -> impl TypedValueParser<Value = T>
where
    T: DeserializeOwned + Clone + Send + Sync + 'static,
{
    PossibleValuesParser::new(words).try_map(|word| T::deserialize(StringDeserializer::<ValueError>::new(word)))
}

/// Why no simulated worker runs.
#[derive(Debug, thiserror::Error)]
pub enum SimCommandError {
    /// The profile cannot be read.
    #[error("cannot read the profile {0}: {1}")]
    Unreadable(PathBuf, #[source] std::io::Error),
    /// The profile is not what it should be.
    #[error("the profile {0}: {1}")]
    Profile(PathBuf, #[source] Box<toml::de::Error>),
    /// The model's text files cannot be used.
    #[error(transparent)]
    Text(#[from] PrefixError),
    /// It does not start.
    #[error(transparent)]
    Start(#[from] SimError),
}

/// Runs it until SIGTERM or ctrl-c.
pub async fn run(args: &SimArgs) -> Result<(), SimCommandError> {
    let codec = Arc::new(ModelCodec::load(args.text.clone())?);
    let mut workers = Vec::with_capacity(args.listen.len());
    for listen in &args.listen {
        let worker = SimWorker::start(engine_options(args, *listen)?, codec.clone()).await?;
        tracing::info!(address = %worker.address(), events = worker.events_endpoint(), "a simulated worker serves here");
        workers.push(worker);
    }
    wait_for_signal().await;
    for worker in workers {
        worker.stop().await;
    }
    Ok(())
}

fn engine_options(args: &SimArgs, listen: SocketAddr) -> Result<SimOptions, SimCommandError> {
    let profile = match &args.profile {
        None => EngineProfile::default(),
        Some(path) => {
            let text =
                std::fs::read_to_string(path).map_err(|source| SimCommandError::Unreadable(path.clone(), source))?;
            toml::from_str(&text).map_err(|source| SimCommandError::Profile(path.clone(), Box::new(source)))?
        }
    };
    // Beside HTTP, on the same interface.
    let beside = |address: IpAddr| SocketAddr::new(address, 0);
    let events = args.events_listen.unwrap_or(beside(listen.ip()));
    Ok(SimOptions {
        listen,
        model: args.model.clone(),
        adapters: args.adapters.clone(),
        role: args.role,
        profile,
        speed_up: args.speed_up,
        events: EventOptions {
            listen: events,
            replay: beside(events.ip()),
            fault: args.events_fault.unwrap_or_default(),
            buffer: args.events_kept,
            ..EventOptions::default()
        },
        side_channel: beside(listen.ip()),
        handing: TransferOptions {
            dialect: args.handing.dialect,
            bootstrap: args.handing.bootstrap_listen.unwrap_or(beside(listen.ip())),
            patience: Duration::from_secs(args.handing.meet_within),
        },
        transfer_fault: args.handing.transfer_fault.unwrap_or_default(),
        ignores_salts: args.ignore_salts,
        ..SimOptions::default()
    })
}

#[cfg(test)]
pub(crate) mod tests;
