//! EndpointSlices of one service in the Kubernetes API (`discovery.k8s.io/v1`), and the workers in them.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;

use crate::discovery::PortSelector;
use vocabulary::WorkerUrl;

/// Maximum number of slices per service; Kubernetes puts a hundred endpoints into each.
const MAX_SLICES: usize = 256;

#[derive(Debug, Deserialize)]
pub(super) struct SliceList {
    #[serde(default)]
    pub(super) metadata: ListMeta,
    #[serde(default)]
    pub(super) items: Vec<EndpointSlice>,
}

/// Metadata of a list: the version of the cluster's state.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ListMeta {
    #[serde(default)]
    pub(super) resource_version: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct EndpointSlice {
    pub(super) metadata: ObjectMeta,
    endpoints: Option<Vec<SliceEndpoint>>,
    ports: Option<Vec<EndpointPort>>,
}

/// Name of an object, and its version of the cluster's state.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ObjectMeta {
    #[serde(default)]
    name: String,
    #[serde(default)]
    pub(super) resource_version: String,
}

#[derive(Debug, Deserialize)]
struct SliceEndpoint {
    #[serde(default)]
    addresses: Vec<String>,
    #[serde(default)]
    conditions: EndpointConditions,
}

/// A missing `ready` counts as true, as in the API reference.
#[derive(Debug, Default, Deserialize)]
struct EndpointConditions {
    ready: Option<bool>,
    terminating: Option<bool>,
}

#[derive(Debug, Deserialize)]
struct EndpointPort {
    name: Option<String>,
    port: Option<u16>,
}

/// One line of a watch.
#[derive(Debug, Deserialize)]
#[serde(tag = "type", content = "object", rename_all = "UPPERCASE")]
pub(super) enum WatchEvent {
    /// A slice that is new, or existed before the watch began.
    Added(EndpointSlice),
    Modified(EndpointSlice),
    Deleted(EndpointSlice),
    /// Nothing else has changed up to this version.
    Bookmark(BookmarkObject),
    /// The watch has ended.
    Error(KubernetesStatus),
}

/// An object that carries only a version.
#[derive(Debug, Deserialize)]
pub(super) struct BookmarkObject {
    pub(super) metadata: ListMeta,
}

/// Why a request was refused, `meta/v1.Status`.
#[derive(Debug, Default, Deserialize)]
pub(super) struct KubernetesStatus {
    #[serde(default)]
    pub(super) code: u16,
    #[serde(default)]
    pub(super) message: String,
}

/// Why no workers can be derived from the slices.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum UnusableSlicesError {
    /// More slices than the limit.
    #[error("it has more than {MAX_SLICES} EndpointSlices")]
    TooMany,
    /// Several ports, or none of the configured name.
    #[error("its ports are {}; `port` is to name one of them", .0.join(", "))]
    Port(Vec<String>),
}

/// The slices of a service, by name.
#[derive(Debug, Default)]
pub(super) struct ServiceSlices(BTreeMap<String, EndpointSlice>);

impl ServiceSlices {
    pub(super) fn of(list: Vec<EndpointSlice>) -> Result<Self, UnusableSlicesError> {
        let mut slices = Self::default();
        list.into_iter().try_for_each(|slice| slices.put(slice))?;
        Ok(slices)
    }

    /// Adds a slice, or replaces it.
    pub(super) fn put(&mut self, slice: EndpointSlice) -> Result<(), UnusableSlicesError> {
        self.0.insert(slice.metadata.name.clone(), slice);
        if self.0.len() > MAX_SLICES { Err(UnusableSlicesError::TooMany) } else { Ok(()) }
    }

    pub(super) fn remove(&mut self, slice: &EndpointSlice) {
        self.0.remove(&slice.metadata.name);
    }

    /// Whether there is no slice: the service does not exist, or selects nothing.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the endpoints that are ready and not terminating, each once, in order.
    pub(super) fn ready_endpoints(
        &self,
        selector: Option<&PortSelector>,
    ) -> Result<BTreeSet<WorkerUrl>, UnusableSlicesError> {
        let mut found = BTreeSet::new();
        for slice in self.0.values() {
            let mut ready = slice.ready_addresses().peekable();
            if ready.peek().is_none() {
                continue;
            }
            let port = slice.selected_port(selector)?;
            // Invalid addresses are skipped.
            found.extend(ready.filter_map(|address| url(address, port)));
        }
        Ok(found)
    }
}

impl EndpointSlice {
    /// Returns one address of each endpoint that takes requests. All addresses of an endpoint are the same pod.
    fn ready_addresses(&self) -> impl Iterator<Item = &str> {
        let is_ready = |endpoint: &&SliceEndpoint| {
            endpoint.conditions.ready.unwrap_or(true) && !endpoint.conditions.terminating.unwrap_or(false)
        };
        self.endpoints
            .iter()
            .flatten()
            .filter(is_ready)
            .filter_map(|endpoint| endpoint.addresses.first().map(String::as_str))
    }

    fn selected_port(&self, selector: Option<&PortSelector>) -> Result<u16, UnusableSlicesError> {
        let ports: Vec<_> =
            self.ports.iter().flatten().filter_map(|port| Some((port.name.as_deref(), port.port?))).collect();
        match (selector, ports.as_slice()) {
            (Some(PortSelector::Number(number)), _) => return Ok(*number),
            (Some(PortSelector::Name(selector)), _) => {
                if let Some((_, port)) = ports.iter().find(|(name, _)| *name == Some(selector)) {
                    return Ok(*port);
                }
            }
            (None, [(_, port)]) => return Ok(*port),
            (None, _) => {}
        }
        let describe = |(name, port): &(Option<&str>, u16)| format!("{} ({port})", name.unwrap_or("without a name"));
        Err(UnusableSlicesError::Port(ports.iter().map(describe).collect()))
    }
}

fn url(address: &str, port: u16) -> Option<WorkerUrl> {
    let host = if address.contains(':') { format!("[{address}]") } else { address.to_owned() };
    format!("http://{host}:{port}").parse().ok()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::discovery::WorkerConfig;

    fn slice(name: &str, ports: serde_json::Value, endpoints: serde_json::Value) -> EndpointSlice {
        serde_json::from_value(json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
            "metadata": {"name": name, "resourceVersion": "7", "labels": {"kubernetes.io/service-name": "engines"}},
            "ports": ports, "endpoints": endpoints,
        }))
        .unwrap()
    }

    fn ready(slices: &ServiceSlices, port: Option<PortSelector>) -> Result<Vec<String>, UnusableSlicesError> {
        Ok(slices
            .ready_endpoints(port.as_ref())?
            .into_iter()
            .map(|url| WorkerConfig::from_url(url).endpoint().to_string())
            .collect())
    }

    #[test]
    fn ready_endpoints_that_are_not_terminating_are_listed_once() {
        let http = json!([{"name": "http", "port": 8000, "protocol": "TCP"}]);
        let endpoints = json!([
            {"addresses": ["10.0.0.2"], "conditions": {"ready": true, "serving": true, "terminating": false}},
            {"addresses": ["10.0.0.1"], "conditions": {}},
            {"addresses": ["10.0.0.3"], "conditions": {"ready": false}},
            {"addresses": ["10.0.0.4"], "conditions": {"ready": true, "terminating": true}},
            {"addresses": ["no host"]},
            {"addresses": []},
        ]);
        let mut slices = ServiceSlices::of(vec![slice("a", http.clone(), endpoints)]).unwrap();
        assert_eq!(ready(&slices, None).unwrap(), ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]);
        let more = json!([{"addresses": ["10.0.0.1"]}, {"addresses": ["fd00::1"]}]);
        slices.put(slice("b", http.clone(), more)).unwrap();
        assert_eq!(ready(&slices, None).unwrap().len(), 3);
        assert!(ready(&slices, None).unwrap().contains(&"http://[fd00::1]:8000".to_owned()));
        slices.remove(&slice("a", json!(null), json!(null)));
        assert_eq!(ready(&slices, None).unwrap(), ["http://10.0.0.1:8000", "http://[fd00::1]:8000"]);
        slices.put(slice("b", http, json!(null))).unwrap();
        assert!(ready(&slices, None).unwrap().is_empty() && !slices.is_empty());
    }

    #[test]
    fn a_port_is_selected_by_number_name_or_as_the_only_one() {
        let both = json!([{"name": "http", "port": 8000}, {"name": "metrics", "port": 9000}]);
        let slices = ServiceSlices::of(vec![slice("a", both, json!([{"addresses": ["10.0.0.1"]}]))]).unwrap();
        let name = |name: &str| Some(PortSelector::Name(name.to_owned()));
        assert_eq!(ready(&slices, name("metrics")).unwrap(), ["http://10.0.0.1:9000"]);
        assert_eq!(ready(&slices, Some(PortSelector::Number(1234))).unwrap(), ["http://10.0.0.1:1234"]);
        for wanted in [None, name("grpc")] {
            let message = ready(&slices, wanted).unwrap_err().to_string();
            assert!(message.contains("http (8000), metrics (9000)"), "{message}");
        }
    }

    #[test]
    fn slices_beyond_the_limit_are_rejected() {
        let many = (0..=MAX_SLICES).map(|number| slice(&number.to_string(), json!([]), json!([])));
        assert_eq!(ServiceSlices::of(many.collect()).unwrap_err(), UnusableSlicesError::TooMany);
    }

    #[test]
    fn watch_lines_are_parsed() {
        let object = json!({"metadata": {"name": "a", "resourceVersion": "9"}, "endpoints": null, "ports": null});
        let read = |kind: &str, object: serde_json::Value| {
            serde_json::from_value::<WatchEvent>(json!({"type": kind, "object": object})).unwrap()
        };
        assert!(
            matches!(read("ADDED", object.clone()), WatchEvent::Added(slice) if slice.metadata.resource_version == "9")
        );
        assert!(matches!(read("DELETED", object), WatchEvent::Deleted(_)));
        let mark = json!({"kind": "EndpointSlice", "metadata": {"resourceVersion": "12"}});
        assert!(matches!(read("BOOKMARK", mark), WatchEvent::Bookmark(mark) if mark.metadata.resource_version == "12"));
        let gone = json!({"kind": "Status", "code": 410, "message": "too old resource version"});
        assert!(matches!(read("ERROR", gone), WatchEvent::Error(status) if status.code == 410));
    }
}
