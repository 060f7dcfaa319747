//! Section `[cluster]`: how this router takes part in the quorum that keeps the ledger.

use std::path::PathBuf;

use ownership::{ClusterOptions, ElectionTimers, TlsFiles};
use serde::Deserialize;
use serde::de::{Deserializer, Error, SeqAccess, Visitor};
use smart_default::SmartDefault;
use vocabulary::TimeSpan;

/// Section `[cluster]`. Without `listen` the router keeps its ledger alone.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize, SmartDefault)]
#[serde(deny_unknown_fields, default)]
pub struct ClusterConfig {
    /// Where other nodes call this one, `HOST:PORT`. Also `--cluster-listen`.
    pub listen: Option<Address>,
    /// What the others are told instead of `listen`, where that is a wildcard or not reachable from outside.
    pub advertise: Option<Address>,
    /// Members to ask for admission when the data directory is new. Also `--join`.
    pub join: AddressList,
    /// How long a new node asks before it gives up.
    #[default(TimeSpan(ClusterOptions::default().join_timeout))]
    pub join_timeout: TimeSpan,
    /// Certificates; without them connections between nodes are plain, and `listen` has to be on the loopback.
    pub tls: Option<PeerTlsConfig>,
    /// Lets `listen` be reached from other machines without `[cluster.tls]`: whoever reaches it can then change the ledger.
    pub allow_plaintext: bool,
    /// How often a leader shows that it is there.
    #[default(TimeSpan(ElectionTimers::default().heartbeat))]
    pub heartbeat_interval: TimeSpan,
    /// The shortest wait for a leader that does not.
    #[default(TimeSpan(ElectionTimers::default().election_min))]
    pub election_timeout_min: TimeSpan,
    /// The longest; a lost leader is replaced after at most about twice this.
    #[default(TimeSpan(ElectionTimers::default().election_max))]
    pub election_timeout_max: TimeSpan,
    /// The highest feature level to work at. For tests of mixed releases.
    pub max_feature_level: Option<u32>,
}

/// Section `[cluster.tls]`: PEM files.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PeerTlsConfig {
    /// Certificates of the authority that signed every node's.
    pub ca: PathBuf,
    /// This node's certificate; it names the host or IP that others dial, for a server and a client.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

impl ClusterConfig {
    /// As the ledger's room takes it.
    pub fn peering(&self) -> ClusterOptions {
        let text = |address: &Option<Address>| address.as_ref().map(|address| address.0.clone());
        ClusterOptions {
            listen: text(&self.listen),
            advertise: text(&self.advertise),
            join: self.join.0.iter().map(|address| address.0.clone()).collect(),
            join_timeout: self.join_timeout.0,
            insecure: self.allow_plaintext,
            tls: self.tls.clone().map(|PeerTlsConfig { ca, certificate, key }| TlsFiles { ca, certificate, key }),
            timers: ElectionTimers {
                heartbeat: self.heartbeat_interval.0,
                election_min: self.election_timeout_min.0,
                election_max: self.election_timeout_max.0,
            },
        }
    }

    /// What no single field can say: where it is wrong, and what is accepted.
    pub fn problem(&self) -> Option<(&'static str, &'static str)> {
        if !self.join.0.is_empty() && self.listen.is_none() {
            let needed =
                "a node that joins must be reachable for the others: give cluster.listen (--cluster-listen), too";
            return Some(("cluster.join", needed));
        }
        if self.advertise.is_some() && self.listen.is_none() {
            return Some(("cluster.advertise", "it only makes sense with cluster.listen"));
        }
        if self.allow_plaintext && self.tls.is_some() {
            return Some((
                "cluster.allow_plaintext",
                "with cluster.tls connections are secure; accepted is one of both",
            ));
        }
        if self.heartbeat_interval.0.as_millis() < 10 || self.election_timeout_max.0.as_secs() > 60 {
            return Some((
                "cluster.heartbeat_interval",
                "accepted is a heartbeat from 10ms on and elections up to 60s",
            ));
        }
        if self.heartbeat_interval >= self.election_timeout_min
            || self.election_timeout_min >= self.election_timeout_max
        {
            return Some((
                "cluster.election_timeout_min",
                "accepted is heartbeat_interval < election_timeout_min < election_timeout_max",
            ));
        }
        None
    }
}

/// Why a text is no address.
#[derive(Debug, thiserror::Error)]
#[error("`{0}` is no address; accepted is HOST:PORT, for example 10.0.0.1:7400 or router-1:7400")]
struct AddressError(String);

/// A host, or an IP address, and a port.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Address(String);

impl Address {
    fn parse(text: &str) -> Result<Self, AddressError> {
        let text = text.trim();
        let sound = text.rsplit_once(':').is_some_and(|(host, port)| {
            let is_host = !host.is_empty() && (!host.contains(':') || host.starts_with('[') && host.ends_with(']'));
            is_host && !host.contains(['/', ' ']) && port.parse::<u16>().is_ok()
        });
        if sound && text.len() <= 256 { Ok(Self(text.to_owned())) } else { Err(AddressError(text.to_owned())) }
    }
}

impl<'de> Deserialize<'de> for Address {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::parse(&String::deserialize(deserializer)?).map_err(Error::custom)
    }
}

/// A list of addresses, or one text with commas between them.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct AddressList(Vec<Address>);

impl<'de> Deserialize<'de> for AddressList {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct AddressesVisitor;

        impl<'de> Visitor<'de> for AddressesVisitor {
            type Value = AddressList;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("HOST:PORT, several with commas between them or as a list")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<AddressList, E> {
                let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
                parts.map(Address::parse).collect::<Result<_, _>>().map(AddressList).map_err(E::custom)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<AddressList, A::Error> {
                let mut all = Vec::new();
                while let Some(address) = sequence.next_element()? {
                    all.push(address);
                }
                Ok(AddressList(all))
            }
        }

        deserializer.deserialize_any(AddressesVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str) -> Result<ClusterConfig, AddressError> {
        let config: ClusterConfig = toml::from_str(text).map_err(|error| AddressError(error.message().to_owned()))?;
        match config.problem() {
            Some((path, problem)) => Err(AddressError(format!("{path}: {problem}"))),
            None => Ok(config),
        }
    }

    #[test]
    fn default_is_a_single_node_with_consistent_timers() {
        let config = check("").unwrap();
        assert_eq!(config, ClusterConfig::default());
        assert_eq!(config.peering(), ClusterOptions::default());
    }

    #[test]
    fn join_addresses_are_a_list_or_comma_separated_text() {
        let list = check("listen = '127.0.0.1:0'\njoin = ['a:1', '[::1]:2']").unwrap();
        let text = check("listen = '127.0.0.1:0'\njoin = 'a:1, [::1]:2'").unwrap();
        assert_eq!(list, text);
        assert_eq!(list.peering().join, ["a:1", "[::1]:2"]);
    }

    #[test]
    fn errors_name_the_accepted_values() {
        let wrong = |text: &str| check(text).unwrap_err().0;
        for address in ["7400", "::1:7400x", "http://a:1", "a:b", ":1", "a b:1"] {
            let error = wrong(&format!("listen = '{address}'"));
            assert!(error.contains("accepted is HOST:PORT"), "{address}: {error}");
        }
        assert!(wrong("join = 'a:1'").contains("cluster.listen"));
        let both = "allow_plaintext = true\n[tls]\nca = 'a'\ncertificate = 'b'\nkey = 'c'";
        assert!(wrong(both).contains("one of both"));
        assert!(wrong("heartbeat_interval = '2s'").contains("heartbeat_interval < election_timeout_min"));
        assert!(wrong("heartbeat_interval = '1ms'").contains("10ms"));
        assert!(wrong("hartbeat_interval = '1s'").contains("unknown field"));
    }
}
