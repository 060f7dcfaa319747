//! Transfers whose legs meet at the source's bootstrap server, as SGLang's and Mooncake's do, and what they refuse.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use engine_model::{Handoff, Transfer};
use serde_json::Value;
use vocabulary::Role;

use super::errors::Fault;
use super::fields::Fields;
use super::transfer_fields::{Identity, params_of, transfer_of, two_way_transfer_of};
use crate::dialect::Spoken;
use crate::sim::rooms::Rooms;

/// How a simulated worker hands KV over.
pub(crate) struct Handing {
    pub(crate) spoken: Spoken,
    pub(crate) role: Role,
    /// Where its bootstrap server listens.
    pub(crate) bootstrap: SocketAddr,
    pub(crate) rooms: Rooms,
    pub(crate) client: reqwest::Client,
    pub(crate) patience: Duration,
}

/// What a request has to do with others.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Part {
    /// Nothing, or what its parameters say by themselves.
    Own(Transfer),
    /// It computes for the leg that comes to this room.
    Source { room: String },
    /// It fetches what is computed for this room.
    Target {
        /// Where the source is asked for it.
        url: String,
    },
}

impl Handing {
    /// What a request's fields mean here.
    pub(crate) fn part(&self, fields: &Fields) -> Result<Part, Fault> {
        let params = fields.object("kv_transfer_params")?;
        match (self.spoken, params) {
            (Spoken::Nixl, params) => Ok(Part::Own(transfer_of(params))),
            (Spoken::Bidirectional, params) => Ok(Part::Own(two_way_transfer_of(params))),
            (Spoken::Sglang, _) if self.role != Role::Hybrid => self.bootstrap(fields),
            (Spoken::Mooncake, Some(params)) => {
                let text = |name: &str| params.get(name).and_then(Value::as_str).unwrap_or_default().to_owned();
                let is = |name: &str| params.get(name) == Some(&Value::Bool(true));
                let name = text("transfer_id");
                Ok(match (is("do_remote_decode"), is("do_remote_prefill")) {
                    (true, false) if !name.is_empty() => Part::Source { room: name },
                    (false, true) => {
                        let (address, engine) = (text("remote_bootstrap_addr"), text("remote_engine_id"));
                        Part::Target { url: format!("{address}/rooms/{engine}/{name}") }
                    }
                    _ => Part::Own(Transfer::None),
                })
            }
            _ => Ok(Part::Own(Transfer::None)),
        }
    }

    fn bootstrap(&self, fields: &Fields) -> Result<Part, Fault> {
        let Some(room) = fields.whole("bootstrap_room")? else {
            let message = "Invalid request: Disaggregated request received without bootstrap room id.";
            return Err(Fault::bad_request(message, Some("bootstrap_room")));
        };
        let host = fields.text("bootstrap_host")?.unwrap_or_default();
        let port = fields.whole("bootstrap_port")?.unwrap_or_default();
        match self.role {
            Role::Prefill if port != i64::from(self.bootstrap.port()) => {
                Err(Fault::bad_request(format!("the bootstrap server listens at {}", self.bootstrap), None))
            }
            Role::Prefill => Ok(Part::Source { room: room.to_string() }),
            Role::Decode | Role::Hybrid => Ok(Part::Target { url: format!("http://{host}:{port}/rooms/any/{room}") }),
        }
    }

    /// The transfer of a request, once its other leg is as far.
    pub(crate) async fn transfer(&self, part: &Part) -> Result<Transfer, Fault> {
        match part {
            Part::Own(transfer) => Ok(transfer.clone()),
            Part::Source { .. } => Ok(Transfer::Produce),
            Part::Target { url } => {
                let asked = self.client.get(url).timeout(self.patience).send().await;
                let told = asked.and_then(reqwest::Response::error_for_status).map_err(|_| Fault::internal())?;
                let params: Value = told.json().await.map_err(|_| Fault::internal())?;
                Ok(transfer_of(params.as_object()))
            }
        }
    }

    /// What a whole answer says of its transfer. SGLang's source ends once somebody came for what it computed.
    pub(crate) async fn hand(
        self: &Arc<Self>,
        part: &Part,
        (handoff, own): (Option<&Handoff>, &Identity),
    ) -> Result<Value, Fault> {
        let params = handoff.map_or(Value::Null, |handoff| params_of(handoff, own));
        let Part::Source { room } = part else { return Ok(params) };
        if params.is_null() {
            return Err(Fault::internal());
        }
        let (rooms, room) = (self.rooms.clone(), room.clone());
        let offered = async move { rooms.offer(&room, params).await };
        if self.spoken == Spoken::Sglang {
            return offered.await.then_some(Value::Null).ok_or_else(Fault::internal);
        }
        tokio::spawn(offered);
        Ok(Value::Null)
    }
}
