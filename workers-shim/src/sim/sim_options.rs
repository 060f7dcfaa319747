//! Start options of a simulated worker, independent of any command line.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::num::NonZeroU64;
use std::str::FromStr;
use std::time::Duration;

use engine_model::EngineProfile;
use smart_default::SmartDefault;
use vocabulary::WorkerRole;

use crate::engine_api::KvConnector;

/// Options of one simulated worker.
#[derive(Clone, Debug, SmartDefault)]
pub struct SimOptions {
    /// HTTP address; port 0 takes any free one.
    #[default(ANY)]
    pub listen: SocketAddr,
    /// The served model name.
    #[default("tiny".to_owned())]
    pub model: String,
    /// LoRA adapters on top of it, each served under its own name; at most 64.
    pub adapters: Vec<String>,
    /// The role that the worker reports. It does not limit what the worker can do.
    #[default(WorkerRole::Hybrid)]
    pub role: WorkerRole,
    /// Speeds and sizes.
    pub profile: EngineProfile,
    /// Engine seconds per real second.
    #[default(1.0)]
    pub speed_up: f64,
    /// KV events.
    pub events: EventOptions,
    /// Address of the KV side channel, which is passed to consumers.
    #[default(ANY)]
    pub side_channel: SocketAddr,
    /// How it transfers KV.
    pub handing: TransferOptions,
    /// Injected faults in KV transfers to consumers.
    pub transfer_fault: TransferFault,
    /// Whether the prefix cache ignores salts, as in engines that do not support them.
    pub ignores_salts: bool,
    /// Maximum size of a request body in bytes.
    #[default(64 << 20)]
    pub body_limit: usize,
}

/// How a worker transfers KV.
#[derive(Clone, Copy, Debug, SmartDefault)]
pub struct TransferOptions {
    /// The connector; a shared store is not simulated.
    #[default(KvConnector::Nixl)]
    pub dialect: KvConnector,
    /// Address of the bootstrap server; port 0 takes any free one.
    #[default(ANY)]
    pub bootstrap: SocketAddr,
    /// How long one leg of a transfer waits for the other, in real time.
    #[default(Duration::from_secs(30))]
    pub patience: Duration,
}

/// How KV events are published.
#[derive(Clone, Debug, SmartDefault)]
pub struct EventOptions {
    /// Address for live events; port 0 takes any free one.
    #[default(ANY)]
    pub listen: SocketAddr,
    /// Address for replays; port 0 takes any free one.
    #[default(ANY)]
    pub replay: SocketAddr,
    /// Number of batches kept for replay.
    #[default(10_000)]
    pub buffer: usize,
    /// First frame of every message; None for vLLM's default `kv@ADDRESS@MODEL`.
    pub topic: Option<String>,
    /// Injected faults.
    pub fault: EventFault,
}

/// Injected faults in live events. A replay is always complete.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct EventFault {
    /// One batch in this many is sent twice.
    pub duplicate: Option<NonZeroU64>,
    /// One batch in this many is not sent.
    pub gap: Option<NonZeroU64>,
}

/// A fault specification that cannot be parsed.
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

/// Injected faults in KV transfers to other workers, which do not notice them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TransferFault {
    /// One read in this many returns damaged blocks.
    pub corrupt: Option<NonZeroU64>,
}

/// A fault specification that cannot be parsed.
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
