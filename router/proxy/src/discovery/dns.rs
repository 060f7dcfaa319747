//! DNS discovery: a name whose addresses are workers, resolved repeatedly.
//!
//! A failed or empty answer changes nothing. Some resolvers return only a part of many addresses each time, so a worker
//! is removed only after its address was missing `MAX_MISSES` times in a row.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{sleep, timeout};

use super::{WorkerDiscovery, WorkerSource};
use crate::discovery::{DnsConfig, WorkerConfig};

/// Consecutive answers without an address before its worker is removed.
const MAX_MISSES: u32 = 3;
/// Timeout for an answer.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of addresses per name; of more, the highest are left out.
const MAX_ADDRESSES: usize = 256;

/// The addresses of a name, each with the number of answers since it was last seen.
#[derive(Debug, Default)]
struct RecentAddresses(BTreeMap<SocketAddr, u32>);

impl RecentAddresses {
    /// Adds an answer; returns the addresses that are in force.
    fn update(&mut self, answer: impl IntoIterator<Item = SocketAddr>) -> Vec<SocketAddr> {
        self.0.values_mut().for_each(|missed| *missed += 1);
        for address in answer {
            self.0.insert(address, 0);
        }
        self.0.retain(|_, missed| *missed < MAX_MISSES);
        while self.0.len() > MAX_ADDRESSES {
            self.0.pop_last();
        }
        self.0.keys().copied().collect()
    }
}

/// Publishes the addresses of the name. Never returns.
pub async fn follow(discovery: Arc<WorkerDiscovery>, (at, config): (usize, DnsConfig)) {
    let resolve = async |name: String| tokio::net::lookup_host(name).await.map(Iterator::collect);
    follow_with(discovery, (at, config), resolve).await;
}

async fn follow_with(
    discovery: Arc<WorkerDiscovery>,
    (at, config): (usize, DnsConfig),
    resolve: impl AsyncFn(String) -> io::Result<Vec<SocketAddr>>,
) {
    let (list, mut known, mut told) = ((WorkerSource::Dns, at), RecentAddresses::default(), Vec::new());
    loop {
        let answer = timeout(RESOLVE_TIMEOUT, resolve(config.address.clone())).await;
        match answer.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
            Ok(answer) if !answer.is_empty() => {
                let addresses = known.update(answer);
                if addresses != told {
                    discovery.update_list(list, addresses.iter().map(|address| worker(&config, *address)).collect());
                    told = addresses;
                }
                discovery.mark_working(list);
            }
            Ok(_) => discovery.mark_failing(list, format!("{} has no address", config.address)),
            Err(error) => discovery.mark_failing(list, format!("{} cannot be resolved: {error}", config.address)),
        }
        sleep(config.refresh_interval.0).await;
    }
}

fn worker(config: &DnsConfig, address: SocketAddr) -> WorkerConfig {
    let url = format!("http://{address}").parse().expect("an address is a host and a port");
    WorkerConfig {
        role: config.role,
        models: config.models.clone(),
        api_key: config.api_key.clone(),
        ..WorkerConfig::from_url(url)
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use super::*;
    use crate::testing::{start_router_at, wait_until};

    fn addresses(all: &[&str]) -> Vec<SocketAddr> {
        all.iter().map(|address| address.parse().unwrap()).collect()
    }

    #[test]
    fn an_address_expires_after_three_consecutive_misses() {
        let mut known = RecentAddresses::default();
        let (a, b) = ("10.0.0.1:8000", "10.0.0.2:8000");
        let both = addresses(&[a, b]);
        assert_eq!(known.update(both.clone()), both);
        for _ in 0..2 {
            assert_eq!(known.update(addresses(&[b])), both);
        }
        assert_eq!(known.update(addresses(&[a])), both, "it is back");
        for _ in 0..2 {
            assert_eq!(known.update(addresses(&[b])), both);
        }
        assert_eq!(known.update(addresses(&[b])), addresses(&[b]));
    }

    #[test]
    fn addresses_per_name_are_limited() {
        let many = (0..5_000_u32).map(|number| SocketAddr::from((number.to_be_bytes(), 80)));
        let known = RecentAddresses::default().update(many);
        assert_eq!((known.len(), known[0]), (MAX_ADDRESSES, "0.0.0.0:80".parse().unwrap()));
    }

    #[tokio::test]
    async fn workers_follow_dns_and_a_failing_resolver_is_reported_without_changes() {
        let router = start_router_at(&[], &[]).await;
        let (app_state, discovery) = (router.gateway.clone(), router.gateway.discovery().clone());
        let answer = Arc::new(Mutex::new(Ok(addresses(&["127.0.0.1:1", "[::1]:2"]))));
        let told = answer.clone();
        let resolve = async move |name: String| {
            assert_eq!(name, "engines.test:8000");
            told.lock().as_ref().map(Vec::clone).map_err(|kind: &io::ErrorKind| (*kind).into())
        };
        let config = DnsConfig {
            address: "engines.test:8000".into(),
            refresh_interval: vocabulary::TimeSpan::millis(20),
            role: Some(vocabulary::WorkerRole::Decode),
            models: Vec::new(),
            api_key: None,
        };
        let following = follow_with(discovery.clone(), (0, config), resolve);
        let endpoints =
            || app_state.fleet().snapshot().iter().map(|view| view.endpoint.to_string()).collect::<Vec<_>>();
        let watching = async {
            wait_until("both came", || endpoints() == ["http://127.0.0.1:1", "http://[::1]:2"]).await;
            assert_eq!(app_state.fleet().snapshot()[0].role, vocabulary::WorkerRole::Decode);
            *answer.lock() = Err(io::ErrorKind::ConnectionRefused);
            wait_until("it is told", || !discovery.failures().is_empty()).await;
            let (source, why) = discovery.failures().remove(0);
            assert!(source == WorkerSource::Dns && why.contains("engines.test:8000 cannot be resolved"), "{why}");
            assert_eq!(endpoints().len(), 2);
            *answer.lock() = Ok(Vec::new());
            wait_until("it has none", || discovery.failures()[0].1.contains("has no address")).await;
            assert_eq!(endpoints().len(), 2);
            *answer.lock() = Ok(addresses(&["[::1]:2"]));
            wait_until("one left", || endpoints() == ["http://[::1]:2"]).await;
            assert_eq!(discovery.failures(), []);
        };
        tokio::select! {
            () = following => {}
            () = watching => {}
        }
    }
}
