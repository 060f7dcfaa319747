//! The operators' API as this program uses it: every request it sends and how it reads the answers.

mod words;

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HOST, IF_MATCH};
use http::{Method, Request, StatusCode};
use http_body_util::Full;
use serde::de::DeserializeOwned;
use vocabulary::{Epoch, Owner, SessionId};

use crate::NemesisError;
use crate::history::{Answer, Asked, Holding, Seat, Sighting};
use crate::http::{Line, Reply, Silence};
pub(crate) use words::{Change, Member, Standing, Status};
use words::{DoneWord, HashWord, LeasesWord, MembersWord, SessionAnswer, SessionsWord};

/// Longest time for what is not part of the load.
const WITHIN: Duration = Duration::from_secs(12);
const BASE: &str = "/ownerserve/v1";

/// Where all nodes are reached, for operators and for clients.
#[derive(Clone, Debug)]
pub(crate) struct Doors {
    addresses: Arc<BTreeMap<Seat, (SocketAddr, SocketAddr)>>,
}

impl Doors {
    /// Operators' and clients' addresses by seat.
    pub(crate) fn new(addresses: BTreeMap<Seat, (SocketAddr, SocketAddr)>) -> Doors {
        Doors { addresses: Arc::new(addresses) }
    }

    /// All seats, taken or not.
    pub(crate) fn seats(&self) -> Vec<Seat> {
        self.addresses.keys().copied().collect()
    }

    /// Where operators reach a node.
    pub(crate) fn operator(&self, seat: Seat) -> SocketAddr {
        self.addresses[&seat].0
    }

    /// Where clients of the models reach a node.
    pub(crate) fn proxy(&self, seat: Seat) -> SocketAddr {
        self.addresses[&seat].1
    }

    /// Connections of one client.
    pub(crate) fn enter(&self) -> Door {
        Door { doors: self.clone(), lines: HashMap::new() }
    }

    /// What a node says of itself.
    pub(crate) async fn status(&self, seat: Seat) -> Result<Status, NemesisError> {
        // Whoever is stopped in its tracks takes connections and answers nothing.
        self.get(seat, "/cluster", Duration::from_secs(2)).await
    }

    /// A node's applied index, and the digest of its state there.
    pub(crate) async fn state_hash(&self, seat: Seat) -> Result<(u64, String), NemesisError> {
        let HashWord { revision, hash } = self.get(seat, "/cluster/hash", WITHIN).await?;
        Ok((revision, hash))
    }

    /// The members, as a node knows them.
    pub(crate) async fn members(&self, seat: Seat) -> Result<Vec<Member>, NemesisError> {
        let MembersWord { members } = self.get(seat, "/cluster/members", WITHIN).await?;
        Ok(members)
    }

    /// Asks for a change of the membership.
    pub(crate) async fn change(&self, seat: Seat, change: &Change) -> Result<(), NemesisError> {
        let (method, path, body) = change.request();
        self.told(seat, (method, &path, body)).await.map(drop)
    }

    /// Raises the cluster's feature level.
    pub(crate) async fn raise_level(&self, seat: Seat, level: u32) -> Result<(), NemesisError> {
        self.told(seat, (Method::PUT, "/cluster/level", serde_json::json!({ "level": level }))).await.map(drop)
    }

    /// A snapshot of a node's ledger, as it lies on its disk.
    pub(crate) async fn snapshot(&self, seat: Seat) -> Result<Bytes, NemesisError> {
        let path = "/cluster/snapshot";
        let reply = self.enter().raw(seat, (Method::GET, path), None, WITHIN).await;
        self.good(seat, path, reply).map(|reply| reply.body)
    }

    /// Lets a node write a snapshot of its ledger to its disk.
    pub(crate) async fn write_snapshot(&self, seat: Seat) -> Result<(), NemesisError> {
        self.told(seat, (Method::POST, "/cluster/snapshot", serde_json::json!({}))).await.map(drop)
    }

    /// Workers' leases, as a node has them.
    pub(crate) async fn leases(&self, seat: Seat) -> Result<Vec<Sighting>, NemesisError> {
        let leases: LeasesWord = self.get(seat, "/leases", WITHIN).await?;
        Ok(leases.sightings())
    }

    /// The present lives of all workers that hold a lease.
    pub(crate) async fn owners(&self, seat: Seat) -> Result<Vec<Owner>, NemesisError> {
        let leases: LeasesWord = self.get(seat, "/leases", WITHIN).await?;
        Ok(leases.owners())
    }

    /// The session that a client of a model calls `key`.
    pub(crate) async fn session_of(&self, seat: Seat, key: &str) -> Result<Option<SessionId>, NemesisError> {
        let path = format!("/sessions?key={key}&model=tiny&consistency=linearizable");
        let SessionsWord { sessions } = self.get(seat, &path, WITHIN).await?;
        Ok(sessions.first().filter(|session| session.owner.is_some()).map(|session| session.id))
    }

    async fn get<T: DeserializeOwned>(&self, seat: Seat, path: &str, within: Duration) -> Result<T, NemesisError> {
        let reply = self.enter().raw(seat, (Method::GET, path), None, within).await;
        let reply = self.good(seat, path, reply)?;
        let odd = |error| NemesisError::Answer { who: format!("{path} of node {}", seat.0), got: format!("{error}") };
        serde_json::from_slice(&reply.body).map_err(odd)
    }

    async fn told(
        &self,
        seat: Seat,
        (method, path, body): (Method, &str, serde_json::Value),
    ) -> Result<Reply, NemesisError> {
        let reply = self.enter().raw(seat, (method, path), Some((body, None)), WITHIN).await;
        self.good(seat, path, reply)
    }

    fn good(&self, seat: Seat, path: &str, reply: Result<Reply, Silence>) -> Result<Reply, NemesisError> {
        let who = || format!("{path} of node {}", seat.0);
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
pub(crate) struct Door {
    doors: Doors,
    lines: HashMap<Seat, Line>,
}

impl Door {
    /// Asks about a session; the node's applied index comes with most answers.
    pub(crate) async fn ask(
        &mut self,
        seat: Seat,
        (subject, asked): (SessionId, Asked),
        within: Duration,
    ) -> (Answer, Option<u64>) {
        let session = format!("/sessions/{subject}");
        let reply = match asked {
            Asked::Read => {
                self.raw(seat, (Method::GET, &format!("{session}?consistency=linearizable")), None, within).await
            }
            Asked::Claim(owner) => {
                let body = serde_json::json!({ "owner": words::target(owner) });
                self.raw(seat, (Method::POST, &format!("{session}/claim")), Some((body, None)), within).await
            }
            Asked::Release { seen, .. } => {
                let body = (serde_json::json!({}), Some(seen));
                self.raw(seat, (Method::POST, &format!("{session}/release")), Some(body), within).await
            }
            Asked::Migrate { to, seen } => {
                let body = (serde_json::json!({ "to": words::target(to), "blocks": "there" }), Some(seen));
                self.raw(seat, (Method::POST, &format!("{session}/migrate")), Some(body), within).await
            }
        };
        match reply {
            Ok(reply) => (read(asked, &reply), revision(&reply)),
            Err(Silence::NotSent(_)) => (Answer::Unavailable, None),
            Err(Silence::Lost(_)) => (Answer::Unknown, None),
        }
    }

    /// A linearizable read that must succeed.
    pub(crate) async fn read(&mut self, seat: Seat, subject: SessionId) -> Result<Holding, NemesisError> {
        match self.ask(seat, (subject, Asked::Read), WITHIN).await.0 {
            Answer::Found(holding) => Ok(holding),
            other => {
                let got = format!("{other:?} to a linearizable read of {subject}");
                Err(NemesisError::Answer { who: format!("node {}", seat.0), got })
            }
        }
    }

    async fn raw(
        &mut self,
        seat: Seat,
        (method, path): (Method, &str),
        body: Option<(serde_json::Value, Option<Epoch>)>,
        within: Duration,
    ) -> Result<Reply, Silence> {
        let address = self.doors.operator(seat);
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
        let request = request.body(Full::new(bytes)).map_err(|error| Silence::NotSent(error.to_string()))?;
        self.lines.entry(seat).or_insert_with(|| Line::new(address)).ask(request, within).await
    }
}

/// What an answer means for the one who asked.
fn read(asked: Asked, reply: &Reply) -> Answer {
    match reply.status {
        StatusCode::OK => understood(asked, &reply.body).unwrap_or(Answer::Unknown),
        // Nothing was sent to the ledger.
        StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS => Answer::Unavailable,
        StatusCode::CONFLICT | StatusCode::PRECONDITION_FAILED | StatusCode::NOT_FOUND => Answer::Refused,
        _ => Answer::Unknown,
    }
}

fn understood(asked: Asked, body: &[u8]) -> Option<Answer> {
    match asked {
        Asked::Read => {
            let SessionAnswer { session } = serde_json::from_slice(body).ok()?;
            Some(Answer::Found(session.holding()))
        }
        Asked::Claim(_) | Asked::Migrate { .. } => {
            let DoneWord { epoch } = serde_json::from_slice(body).ok()?;
            epoch.map(Answer::Granted)
        }
        Asked::Release { .. } => Some(Answer::Released),
    }
}

fn revision(reply: &Reply) -> Option<u64> {
    reply.headers.get("ownerserve-revision")?.to_str().ok()?.parse().ok()
}
