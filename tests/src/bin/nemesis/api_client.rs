//! Client of the operator API: every request this program sends and how it interprets the responses.

mod json;

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HOST, IF_MATCH};
use http::{Method, Request, StatusCode};
use http_body_util::Full;
use serde::de::DeserializeOwned;
use vocabulary::{ArtifactId, Epoch, Owner, SessionId};

use crate::NemesisError;
use crate::history::{
    LeaseSighting, MemberSlot, OwnershipReply, OwnershipRequest, Register, RegisterReply, RegisterRequest, SessionOwner,
};
use crate::http::{HttpFailure, HttpReply, KeepAliveConnection};
use json::{LeasesJson, MembersJson, SessionReplyJson, SessionsJson, StateHashJson, WriteReplyJson};
pub(crate) use json::{MemberJson, MemberRoleJson, MembershipChange, NodeStatusJson};

/// Timeout of requests that are not part of the load.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(12);
const BASE: &str = "/ownerserve/v1";

/// Addresses of all nodes, for operators and for clients.
#[derive(Clone, Debug)]
pub(crate) struct ClusterAddresses {
    addresses: Arc<BTreeMap<MemberSlot, (SocketAddr, SocketAddr)>>,
}

impl ClusterAddresses {
    /// Creates the table from operator and client addresses by slot.
    pub(crate) fn new(addresses: BTreeMap<MemberSlot, (SocketAddr, SocketAddr)>) -> ClusterAddresses {
        ClusterAddresses { addresses: Arc::new(addresses) }
    }

    /// Returns all slots, occupied or not.
    pub(crate) fn seats(&self) -> Vec<MemberSlot> {
        self.addresses.keys().copied().collect()
    }

    /// Operator address of a node.
    pub(crate) fn operator(&self, slot: MemberSlot) -> SocketAddr {
        self.addresses[&slot].0
    }

    /// Client address of a node.
    pub(crate) fn proxy(&self, slot: MemberSlot) -> SocketAddr {
        self.addresses[&slot].1
    }

    /// Creates the connections of one client.
    pub(crate) fn client(&self) -> ApiClient {
        ApiClient { addresses: self.clone(), connections: HashMap::new() }
    }

    /// Returns a node's own status.
    pub(crate) async fn status(&self, slot: MemberSlot) -> Result<NodeStatusJson, NemesisError> {
        // A paused process accepts connections but never responds.
        self.get(slot, "/cluster", Duration::from_secs(2)).await
    }

    /// Returns a node's applied index and the hash of its state there.
    pub(crate) async fn state_hash(&self, slot: MemberSlot) -> Result<(u64, String), NemesisError> {
        let StateHashJson { revision, state_hash } = self.get(slot, "/cluster/state-hash", REQUEST_TIMEOUT).await?;
        Ok((revision, state_hash))
    }

    /// Returns the members as a node knows them.
    pub(crate) async fn members(&self, slot: MemberSlot) -> Result<Vec<MemberJson>, NemesisError> {
        let MembersJson { members } = self.get(slot, "/cluster/members", REQUEST_TIMEOUT).await?;
        Ok(members)
    }

    /// Requests a membership change.
    pub(crate) async fn change(&self, slot: MemberSlot, change: &MembershipChange) -> Result<(), NemesisError> {
        let (method, path, body) = change.request();
        self.send(slot, (method, &path, body)).await.map(drop)
    }

    /// Raises the cluster's feature level.
    pub(crate) async fn raise_level(&self, slot: MemberSlot, level: u32) -> Result<(), NemesisError> {
        let body = serde_json::json!({ "feature_level": level });
        self.send(slot, (Method::PUT, "/cluster/feature-level", body)).await.map(drop)
    }

    /// Downloads a snapshot of a node's ledger as it is stored on disk.
    pub(crate) async fn snapshot(&self, slot: MemberSlot) -> Result<Bytes, NemesisError> {
        let path = "/cluster/snapshot";
        let reply = self.client().raw(slot, (Method::GET, path), None, REQUEST_TIMEOUT).await;
        self.expect_success(slot, path, reply).map(|reply| reply.body)
    }

    /// Makes a node write a snapshot of its ledger to disk.
    pub(crate) async fn write_snapshot(&self, slot: MemberSlot) -> Result<(), NemesisError> {
        self.send(slot, (Method::POST, "/cluster/snapshot", serde_json::json!({}))).await.map(drop)
    }

    /// Returns the workers' leases as a node knows them.
    pub(crate) async fn leases(&self, slot: MemberSlot) -> Result<Vec<LeaseSighting>, NemesisError> {
        let leases: LeasesJson = self.get(slot, "/leases", REQUEST_TIMEOUT).await?;
        Ok(leases.sightings())
    }

    /// Returns the current incarnations of all workers that hold a lease.
    pub(crate) async fn live_owners(&self, slot: MemberSlot) -> Result<Vec<Owner>, NemesisError> {
        let leases: LeasesJson = self.get(slot, "/leases", REQUEST_TIMEOUT).await?;
        Ok(leases.live_owners())
    }

    /// Returns the session that clients of the model name `key`.
    pub(crate) async fn session_of(&self, slot: MemberSlot, key: &str) -> Result<Option<SessionId>, NemesisError> {
        let path = format!("/sessions?session_key={key}&model=tiny&consistency=linearizable");
        let SessionsJson { sessions } = self.get(slot, &path, REQUEST_TIMEOUT).await?;
        Ok(sessions.first().filter(|session| session.owner.is_some()).map(|session| session.id))
    }

    /// Returns the artifact that a session ends in.
    pub(crate) async fn head_artifact(
        &self,
        slot: MemberSlot,
        subject: SessionId,
    ) -> Result<Option<ArtifactId>, NemesisError> {
        let path = format!("/sessions/{subject}?consistency=linearizable");
        let SessionReplyJson { session } = self.get(slot, &path, REQUEST_TIMEOUT).await?;
        Ok(session.head_artifact())
    }

    async fn get<T: DeserializeOwned>(
        &self,
        slot: MemberSlot,
        path: &str,
        within: Duration,
    ) -> Result<T, NemesisError> {
        let reply = self.client().raw(slot, (Method::GET, path), None, within).await;
        let reply = self.expect_success(slot, path, reply)?;
        let odd = |error| NemesisError::Answer { who: format!("{path} of node {}", slot.0), got: format!("{error}") };
        serde_json::from_slice(&reply.body).map_err(odd)
    }

    async fn send(
        &self,
        slot: MemberSlot,
        (method, path, body): (Method, &str, serde_json::Value),
    ) -> Result<HttpReply, NemesisError> {
        let reply = self.client().raw(slot, (method, path), Some((body, None)), REQUEST_TIMEOUT).await;
        self.expect_success(slot, path, reply)
    }

    fn expect_success(
        &self,
        slot: MemberSlot,
        path: &str,
        reply: Result<HttpReply, HttpFailure>,
    ) -> Result<HttpReply, NemesisError> {
        let who = || format!("{path} of node {}", slot.0);
        match reply {
            Ok(reply) if reply.status.is_success() => Ok(reply),
            Ok(reply) => {
                let body = String::from_utf8_lossy(&reply.body).into_owned();
                Err(NemesisError::Answer { who: who(), got: format!("{} {body}", reply.status) })
            }
            Err(silence) => Err(NemesisError::Answer { who: who(), got: silence.to_string() }),
        }
    }
}

/// One client's connections to all nodes.
pub(crate) struct ApiClient {
    addresses: ClusterAddresses,
    connections: HashMap<MemberSlot, KeepAliveConnection>,
}

impl ApiClient {
    /// Sends an ownership request. Most responses carry the node's applied index.
    pub(crate) async fn request(
        &mut self,
        slot: MemberSlot,
        (subject, asked): (SessionId, OwnershipRequest),
        within: Duration,
    ) -> (OwnershipReply, Option<u64>) {
        let session = format!("/sessions/{subject}");
        let reply = match asked {
            OwnershipRequest::Read => {
                self.raw(slot, (Method::GET, &format!("{session}?consistency=linearizable")), None, within).await
            }
            OwnershipRequest::Claim(owner) => {
                let body = serde_json::json!({ "owner": json::target(owner) });
                self.raw(slot, (Method::POST, &format!("{session}/claim")), Some((body, None)), within).await
            }
            OwnershipRequest::Release { seen, .. } => {
                let body = (serde_json::json!({}), Some(seen));
                self.raw(slot, (Method::POST, &format!("{session}/release")), Some(body), within).await
            }
            OwnershipRequest::Migrate { to, seen } => {
                let body = (serde_json::json!({ "target": json::target(to), "record_only": true }), Some(seen));
                self.raw(slot, (Method::POST, &format!("{session}/migrate")), Some(body), within).await
            }
        };
        let answer = match ReplyOutcome::of(&reply) {
            ReplyOutcome::Done(body) => parse_reply(asked, body).unwrap_or(OwnershipReply::Unknown),
            ReplyOutcome::Refused => OwnershipReply::Refused,
            ReplyOutcome::Unavailable => OwnershipReply::Unavailable,
            ReplyOutcome::Unknown => OwnershipReply::Unknown,
        };
        (answer, reply.ok().as_ref().and_then(revision))
    }

    /// Sends a request about a register.
    pub(crate) async fn register_request(
        &mut self,
        slot: MemberSlot,
        (register, asked): (Register, RegisterRequest),
        within: Duration,
    ) -> RegisterReply {
        let reply = match asked {
            RegisterRequest::Read => {
                let path = format!("{}?consistency=linearizable", json::register_path(register));
                self.raw(slot, (Method::GET, &path), None, within).await
            }
            RegisterRequest::Write(value) => {
                let (path, body) = json::register_write(register, value);
                self.raw(slot, (Method::PUT, &path), Some((body, None)), within).await
            }
        };
        match (ReplyOutcome::of(&reply), asked) {
            (ReplyOutcome::Done(_), RegisterRequest::Write(_)) => RegisterReply::Written,
            (ReplyOutcome::Done(body), RegisterRequest::Read) => {
                json::register_value(register, body).map_or(RegisterReply::Unknown, RegisterReply::Found)
            }
            (ReplyOutcome::Refused, _) => RegisterReply::Refused,
            (ReplyOutcome::Unavailable, _) => RegisterReply::Unavailable,
            (ReplyOutcome::Unknown, _) => RegisterReply::Unknown,
        }
    }

    /// Performs a linearizable read, which must succeed.
    pub(crate) async fn read_owner(
        &mut self,
        slot: MemberSlot,
        subject: SessionId,
    ) -> Result<SessionOwner, NemesisError> {
        match self.request(slot, (subject, OwnershipRequest::Read), REQUEST_TIMEOUT).await.0 {
            OwnershipReply::Found(holding) => Ok(holding),
            other => {
                let detail = format!("{other:?} to a linearizable read of {subject}");
                Err(NemesisError::Answer { who: format!("node {}", slot.0), got: detail })
            }
        }
    }

    async fn raw(
        &mut self,
        slot: MemberSlot,
        (method, path): (Method, &str),
        body: Option<(serde_json::Value, Option<Epoch>)>,
        within: Duration,
    ) -> Result<HttpReply, HttpFailure> {
        let address = self.addresses.operator(slot);
        let mut request =
            Request::builder().method(method).uri(format!("{BASE}{path}")).header(HOST, address.to_string());
        let mut bytes = Bytes::new();
        if let Some((body, fence)) = body {
            request = request.header(CONTENT_TYPE, "application/json");
            if let Some(seen) = fence {
                request = request.header(IF_MATCH, format!("\"{seen}\""));
            }
            bytes = body.to_string().into();
        }
        let request = request.body(Full::new(bytes)).map_err(|error| HttpFailure::NotSent(error.to_string()))?;
        self.connections.entry(slot).or_insert_with(|| KeepAliveConnection::new(address)).request(request, within).await
    }
}

/// What a client knows after a request.
enum ReplyOutcome<'a> {
    /// It succeeded, with this body.
    Done(&'a [u8]),
    /// The ledger refused it.
    Refused,
    /// Nothing was proposed to the ledger.
    Unavailable,
    /// It may still take effect.
    Unknown,
}

impl ReplyOutcome<'_> {
    fn of(reply: &Result<HttpReply, HttpFailure>) -> ReplyOutcome<'_> {
        match reply {
            Ok(reply) => match reply.status {
                StatusCode::OK => ReplyOutcome::Done(&reply.body),
                StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS => ReplyOutcome::Unavailable,
                StatusCode::CONFLICT | StatusCode::PRECONDITION_FAILED | StatusCode::NOT_FOUND => ReplyOutcome::Refused,
                _ => ReplyOutcome::Unknown,
            },
            Err(HttpFailure::NotSent(_)) => ReplyOutcome::Unavailable,
            Err(HttpFailure::Lost(_)) => ReplyOutcome::Unknown,
        }
    }
}

fn parse_reply(request: OwnershipRequest, body: &[u8]) -> Option<OwnershipReply> {
    match request {
        OwnershipRequest::Read => {
            let SessionReplyJson { session } = serde_json::from_slice(body).ok()?;
            Some(OwnershipReply::Found(session.session_owner()))
        }
        OwnershipRequest::Claim(_) | OwnershipRequest::Migrate { .. } => {
            let WriteReplyJson { epoch } = serde_json::from_slice(body).ok()?;
            epoch.map(OwnershipReply::Granted)
        }
        OwnershipRequest::Release { .. } => Some(OwnershipReply::Released),
    }
}

fn revision(reply: &HttpReply) -> Option<u64> {
    reply.headers.get("ownerserve-revision")?.to_str().ok()?.parse().ok()
}
