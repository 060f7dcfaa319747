//! Finds where a worker publishes its KV events: from the configuration, or with `GET /kv_event_sources`.

use std::collections::BTreeMap;

use serde::Deserialize;
use vocabulary::DpRank;

use crate::fleet::EventSourceSetting;

/// Maximum number of ranks per worker.
const MAX_SOURCES: usize = 1024;

/// The event publisher of one data-parallel rank.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EventSource {
    /// The rank.
    pub rank: DpRank,
    /// `tcp://host:port` of the live stream.
    pub live: String,
    /// `tcp://host:port` of the replay socket.
    pub replay: Option<String>,
}

impl EventSource {
    /// Returns the configured source; None if sources are discovered or ignored.
    pub(super) fn configured(at: &EventSourceSetting) -> Option<Self> {
        match at {
            EventSourceSetting::Configured { live, replay } => {
                Some(Self { rank: DpRank(0), live: live.clone(), replay: replay.clone() })
            }
            EventSourceSetting::Discovered | EventSourceSetting::Ignored => None,
        }
    }

    /// Parses a worker's response: a map of sources by rank, as vLLM 0.32 writes it (observed), or a list of sources
    /// with their ranks. Sources that are not reachable by TCP are left out. In addresses without a host, the worker's
    /// own is used.
    pub(super) fn read_all(text: &str, worker: &str) -> Vec<Self> {
        let listed: Vec<_> = match serde_json::from_str(text) {
            Ok(EventSourceList::ByRank(by_rank)) => {
                by_rank.into_iter().filter_map(|(rank, listed)| Some((rank.parse().ok()?, listed))).collect()
            }
            Ok(EventSourceList::List(list)) => {
                list.into_iter().map(|listed| (listed.data_parallel_rank.unwrap_or(0), listed)).collect()
            }
            Err(_) => Vec::new(),
        };
        let host = host_of(worker);
        let source = |(rank, listed): (u16, EventSourceEntry)| {
            Some(Self {
                rank: DpRank(rank),
                live: resolve_endpoint(&listed.endpoint, host)?,
                replay: listed.replay_endpoint.and_then(|endpoint| resolve_endpoint(&endpoint, host)),
            })
        };
        listed.into_iter().take(MAX_SOURCES).filter_map(source).collect()
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum EventSourceList {
    ByRank(BTreeMap<String, EventSourceEntry>),
    List(Vec<EventSourceEntry>),
}

#[derive(Deserialize)]
struct EventSourceEntry {
    endpoint: String,
    replay_endpoint: Option<String>,
    data_parallel_rank: Option<u16>,
}

/// Returns the host of a URL, including the brackets of IPv6.
pub(crate) fn host_of(url: &str) -> &str {
    let authority = url.split_once("://").map_or(url, |(_, rest)| rest);
    let authority = authority.split('/').next().unwrap_or(authority);
    match authority.rsplit_once(':') {
        Some((host, _)) if !host.is_empty() && (!authority.starts_with('[') || host.ends_with(']')) => host,
        _ => authority,
    }
}

fn resolve_endpoint(endpoint: &str, worker: &str) -> Option<String> {
    let (host, port) = endpoint.strip_prefix("tcp://")?.rsplit_once(':')?;
    let port: u16 = port.parse().ok()?;
    let host = if matches!(host, "*" | "0.0.0.0" | "::" | "[::]") { worker } else { host };
    Some(format!("tcp://{host}:{port}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str, worker: &str) -> Vec<(u16, String, Option<String>)> {
        let sources = EventSource::read_all(text, worker);
        sources.into_iter().map(|source| (source.rank.0, source.live, source.replay)).collect()
    }

    #[test]
    fn wildcard_endpoints_resolve_to_the_worker() {
        let text = r#"[{"data_parallel_rank":1,"endpoint":"tcp://*:5558","replay_endpoint":"tcp://0.0.0.0:5568",
                        "topic":"kv","transport":"zmq"},{"endpoint":"tcp://10.0.0.9:7","replay_endpoint":null}]"#;
        let expected = [
            (1, "tcp://10.1.2.3:5558".to_owned(), Some("tcp://10.1.2.3:5568".to_owned())),
            (0, "tcp://10.0.0.9:7".to_owned(), None),
        ];
        assert_eq!(read(text, "http://10.1.2.3:8000"), expected);
        assert_eq!(read(r#"[{"endpoint":"tcp://[::]:9"}]"#, "https://[fd00::1]:8000/")[0].1, "tcp://[fd00::1]:9");
        assert_eq!(read(r#"[{"endpoint":"tcp://*:9"}]"#, "http://plain")[0].1, "tcp://plain:9");
    }

    #[test]
    fn recorded_source_list_is_read_by_rank() {
        let text = r#"{"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:39345",
            "replay_endpoint":"tcp://127.0.0.1:51229","buffer_steps":10000,"hwm":100000,"max_queue_size":100000,
            "topic":"kv"},"1":{"endpoint":"tcp://*:39346","replay_endpoint":null}}"#;
        let expected = [
            (0, "tcp://10.0.0.1:39345".to_owned(), Some("tcp://127.0.0.1:51229".to_owned())),
            (1, "tcp://10.0.0.1:39346".to_owned(), None),
        ];
        assert_eq!(read(text, "http://10.0.0.1:8000"), expected);
    }

    #[test]
    fn unreachable_or_unreadable_sources_are_skipped() {
        for text in
            ["", "null", "{}", "[]", "[1]", r#"[{"endpoint":"ipc:///tmp/x"}]"#, r#"[{"endpoint":"tcp://*:0x"}]"#]
        {
            assert_eq!(read(text, "http://a:1"), [], "{text:?}");
        }
        let no_replay = r#"[{"endpoint":"tcp://*:1","replay_endpoint":"inproc://x"}]"#;
        assert_eq!(read(no_replay, "http://a:1"), [(0, "tcp://a:1".to_owned(), None)]);
    }
}
