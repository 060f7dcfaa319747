//! `ownerserve sim-worker`: a simulated engine that speaks the small model's text, or another model's.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use prefix::PrefixError;
use serde::de::DeserializeOwned;
use serde::de::value::{Error as ValueError, StringDeserializer};
use vocabulary::{TimeSpan, WorkerRole};
use workers_shim::engine_api::KvConnector;
use workers_shim::sim::{
    EngineProfile, EventFault, EventOptions, SimOptions, SimStartError, SimWorker, TransferFault, TransferOptions,
};

use proxy::renamed_keys;
use proxy::shutdown_signal::wait_for_signal;
use proxy::toml_file::{TomlFileError, read_toml};
use vocabulary::flags;

mod codec;

pub use codec::ModelTextCodec;

/// Runs a simulated engine: vLLM on the wire, no model inside.
#[derive(Clone, Debug, Args)]
pub struct SimArgs {
    /// HTTP address; port 0 takes a free port, which the log shows. Each of several addresses is an engine of its own.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:8000")]
    listen: Vec<SocketAddr>,
    /// Role: computes prompts for others, generates answers, or does both.
    #[arg(long, default_value = "hybrid", value_parser = one_of::<WorkerRole>(&["prefill", "decode", "hybrid"]))]
    role: WorkerRole,
    /// Name of the served model.
    #[arg(long, value_name = "NAME", default_value = "tiny")]
    model: String,
    /// LoRA adapter of the model, served under this name with KV blocks of its own; may be repeated.
    #[arg(long = "lora-adapter", value_name = "NAME")]
    lora_adapters: Vec<String>,
    /// Model directory with tokenizer.json and chat template; when left out, a small built-in model.
    #[arg(long, value_name = "DIR")]
    tokenizer_dir: Option<PathBuf>,
    /// Speeds and capacities (TOML), as in configs/profiles.
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    /// Factor by which it runs faster than the modelled engine.
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0)]
    speed_up: f64,
    /// Address at which it publishes KV events [default: any free port]; GET /kv_event_sources shows it.
    #[arg(long, value_name = "ADDR")]
    kv_events_listen: Option<SocketAddr>,
    /// Number of KV event messages that it keeps for replay.
    #[arg(long, value_name = "MESSAGES", default_value_t = EventOptions::default().buffer)]
    kv_events_buffer: usize,
    /// Fault of published KV events, for tests: duplicate=N, gap=N.
    #[arg(long, value_name = "FAULTS")]
    kv_events_fault: Option<EventFault>,
    #[command(flatten)]
    handing: KvTransferArgs,
    /// Keeps all prompts in one cache, whatever their cache_salt, for tests.
    #[arg(long)]
    ignore_cache_salt: bool,
    /// Ends when standard input closes.
    #[arg(long, hide = true)]
    pub exit_with_parent: bool,
}

// How a simulated engine hands KV over. Not a doc comment: as one it would be the help of whole `sim-worker`.
#[derive(Clone, Debug, Args)]
struct KvTransferArgs {
    /// Fault of KV transfers to other workers, for tests: corrupt=N silently damages one of N reads.
    #[arg(long, value_name = "FAULT")]
    transfer_fault: Option<TransferFault>,
    /// KV connector of the engine, which also decides whose metrics it shows.
    #[arg(long, value_name = "NAME", value_enum, default_value_t = KvConnectorArg::Nixl)]
    kv_connector: KvConnectorArg,
    /// Address of its bootstrap server [default: any free port]; SGLang's GET /server_info shows it.
    #[arg(long, value_name = "ADDR")]
    bootstrap_listen: Option<SocketAddr>,
    /// Timeout with which one leg of a transfer waits for the other.
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = flags::duration)]
    handshake_timeout: TimeSpan,
}

/// KV connector of a simulated engine.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
#[value(rename_all = "snake_case")]
enum KvConnectorArg {
    /// OpenAI's API without transfers.
    None,
    /// vLLM with NIXL.
    Nixl,
    /// vLLM with NIXL in its bidirectional mode.
    NixlBidirectional,
    /// vLLM with Mooncake.
    Mooncake,
    /// SGLang, whose prefill and decode workers answer only requests with a bootstrap room.
    Sglang,
}

impl KvConnectorArg {
    fn connector(self) -> KvConnector {
        match self {
            Self::None => KvConnector::None,
            Self::Nixl => KvConnector::Nixl,
            Self::NixlBidirectional => KvConnector::NixlBidirectional,
            Self::Mooncake => KvConnector::Mooncake,
            Self::Sglang => KvConnector::Sglang,
        }
    }
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
    Profile(PathBuf, #[source] TomlFileError),
    /// The model's text files cannot be used.
    #[error(transparent)]
    Text(#[from] PrefixError),
    /// It does not start.
    #[error(transparent)]
    Start(#[from] SimStartError),
}

/// Runs it until SIGTERM or ctrl-c.
pub async fn run(args: &SimArgs) -> Result<(), SimCommandError> {
    let codec = Arc::new(ModelTextCodec::load(args.tokenizer_dir.clone())?);
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
            read_toml(&text, renamed_keys::PROFILE).map_err(|source| SimCommandError::Profile(path.clone(), source))?
        }
    };
    // Beside HTTP, on the same interface.
    let beside = |address: IpAddr| SocketAddr::new(address, 0);
    let events = args.kv_events_listen.unwrap_or(beside(listen.ip()));
    Ok(SimOptions {
        listen,
        model: args.model.clone(),
        adapters: args.lora_adapters.clone(),
        role: args.role,
        profile,
        speed_up: args.speed_up,
        events: EventOptions {
            listen: events,
            replay: beside(events.ip()),
            fault: args.kv_events_fault.unwrap_or_default(),
            buffer: args.kv_events_buffer,
            ..EventOptions::default()
        },
        side_channel: beside(listen.ip()),
        handing: TransferOptions {
            dialect: args.handing.kv_connector.connector(),
            bootstrap: args.handing.bootstrap_listen.unwrap_or(beside(listen.ip())),
            patience: args.handing.handshake_timeout.0,
        },
        transfer_fault: args.handing.transfer_fault.unwrap_or_default(),
        ignores_salts: args.ignore_cache_salt,
        ..SimOptions::default()
    })
}

#[cfg(test)]
pub(crate) mod tests;
