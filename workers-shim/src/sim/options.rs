//! What a simulated worker is started with. Free of any command line: whoever has one fills this in.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::num::NonZeroU64;
use std::str::FromStr;
use std::time::Duration;

use engine_model::EngineProfile;
use smart_default::SmartDefault;
use vocabulary::WorkerRole;

use crate::engine_api::KvConnector;

/// Everything about one simulated worker.
#[derive(Clone, Debug, SmartDefault)]
pub struct SimOptions {
    /// HTTP; port 0 takes any free one.
    #[default(ANY)]
    pub listen: SocketAddr,
    /// The name under which the model is served.
    #[default("tiny".to_owned())]
    pub model: String,
    /// LoRA adapters on top of it, each served under its name; at most 64.
    pub adapters: Vec<String>,
    /// A label: it changes what the worker says of itself, not what it can do.
    #[default(WorkerRole::Hybrid)]
    pub role: WorkerRole,
    /// How fast and how large.
    pub profile: EngineProfile,
    /// Engine seconds that pass in a real one.
    #[default(1.0)]
    pub speed_up: f64,
    /// KV events.
    pub events: EventOptions,
    /// Where the KV side channel listens; the address is handed to consumers.
    #[default(ANY)]
    pub side_channel: SocketAddr,
    /// How it hands KV over.
    pub handing: TransferOptions,
    /// What goes wrong with KV on its way to consumers.
    pub transfer_fault: TransferFault,
    /// Whether it keeps all prompts in one cache, whatever salt they come with, as engines do that do not know salts.
    pub ignores_salts: bool,
    /// Largest request body in bytes.
    #[default(64 << 20)]
    pub body_limit: usize,
}

/// How a worker hands KV over.
#[derive(Clone, Copy, Debug, SmartDefault)]
pub struct TransferOptions {
    /// The dialect; there is no simulated store.
    #[default(KvConnector::Nixl)]
    pub dialect: KvConnector,
    /// Where the bootstrap server listens; port 0 takes any free one.
    #[default(ANY)]
    pub bootstrap: SocketAddr,
    /// How long one leg of a transfer waits for the other, in real time.
    #[default(Duration::from_secs(30))]
    pub patience: Duration,
}

/// How KV events are told.
#[derive(Clone, Debug, SmartDefault)]
pub struct EventOptions {
    /// Where live events are published; port 0 takes any free one.
    #[default(ANY)]
    pub listen: SocketAddr,
    /// Where replay is asked for; port 0 takes any free one.
    #[default(ANY)]
    pub replay: SocketAddr,
    /// Batches kept for replay.
    #[default(10_000)]
    pub buffer: usize,
    /// First frame of every message; none for vLLM's `kv@ADDRESS@MODEL`.
    pub topic: Option<String>,
    /// What goes wrong on the way.
    pub fault: EventFault,
}

/// What goes wrong with events on their way to live subscribers. Replay always has them all.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct EventFault {
    /// Every so many batches, one is sent twice.
    pub duplicate: Option<NonZeroU64>,
    /// Every so many batches, one is not sent.
    pub gap: Option<NonZeroU64>,
}

/// A fault that cannot be read.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("`{0}` is not an event fault: write duplicate=N, gap=N or both with a comma")]
pub struct EventFaultError(String);

impl FromStr for EventFault {
    type Err = EventFaultError;

    fn from_str(text: &str) -> Result<Self, EventFaultError> {
        let mut fault = Self::default();
        for part in text.split(',') {
            let wrong = || EventFaultError(part.to_owned());
            let (name, number) = part.split_once('=').ok_or_else(wrong)?;
            let number = Some(number.trim().parse().map_err(|_| wrong())?);
            match name.trim() {
                "duplicate" => fault.duplicate = number,
                "gap" => fault.gap = number,
                _ => return Err(wrong()),
            }
        }
        Ok(fault)
    }
}

/// What goes wrong with KV on its way to other workers, who are not told.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TransferFault {
    /// Of so many reads one gets damaged blocks.
    pub corrupt: Option<NonZeroU64>,
}

/// A fault that cannot be read.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("`{0}` is not a transfer fault: write corrupt=N, for one of N reads")]
pub struct TransferFaultError(String);

impl FromStr for TransferFault {
    type Err = TransferFaultError;

    fn from_str(text: &str) -> Result<Self, TransferFaultError> {
        let number = text.trim().strip_prefix("corrupt=").and_then(|number| number.trim().parse().ok());
        number.map(|number| Self { corrupt: Some(number) }).ok_or_else(|| TransferFaultError(text.to_owned()))
    }
}

const ANY: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);
