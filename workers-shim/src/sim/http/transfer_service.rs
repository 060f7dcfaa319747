//! Transfers whose legs meet at the source's bootstrap server, as with SGLang and Mooncake, and the requests that these
//! reject.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use engine_model::{HandoffOffer, TransferRole};
use serde_json::Value;
use vocabulary::WorkerRole;

use super::errors::ErrorResponse;
use super::request_fields::RequestFields;
use super::transfer_fields::{SideChannelIdentity, bidirectional_transfer_of, params_of, transfer_of};
use crate::engine_api::KvConnector;
use crate::sim::bootstrap_rooms::BootstrapRooms;

/// How a simulated worker transfers KV.
pub(crate) struct KvTransferResolver {
    pub(crate) connector: KvConnector,
    pub(crate) role: WorkerRole,
    /// Address of its bootstrap server.
    pub(crate) bootstrap: SocketAddr,
    pub(crate) rooms: BootstrapRooms,
    pub(crate) client: reqwest::Client,
    pub(crate) timeout: Duration,
}

/// A request's part in a transfer.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum TransferSide {
    /// None, or a role that its parameters define completely.
    Standalone(TransferRole),
    /// It computes for the leg with the same room.
    Source { room: String },
    /// It fetches what the leg with the same room computes.
    Target {
        /// The URL at which the source offers it.
        url: String,
    },
}

impl KvTransferResolver {
    /// Returns the part that a request's fields define.
    pub(crate) fn side_of(&self, fields: &RequestFields) -> Result<TransferSide, ErrorResponse> {
        let params = fields.object("kv_transfer_params")?;
        match (self.connector, params) {
            (KvConnector::Nixl, params) => Ok(TransferSide::Standalone(transfer_of(params))),
            (KvConnector::NixlBidirectional, params) => Ok(TransferSide::Standalone(bidirectional_transfer_of(params))),
            (KvConnector::Sglang, _) if self.role != WorkerRole::Hybrid => self.bootstrap_side(fields),
            (KvConnector::Mooncake, Some(params)) => {
                let text = |name: &str| params.get(name).and_then(Value::as_str).unwrap_or_default().to_owned();
                let is = |name: &str| params.get(name) == Some(&Value::Bool(true));
                let name = text("transfer_id");
                Ok(match (is("do_remote_decode"), is("do_remote_prefill")) {
                    (true, false) if !name.is_empty() => TransferSide::Source { room: name },
                    (false, true) => {
                        let (address, engine) = (text("remote_bootstrap_addr"), text("remote_engine_id"));
                        TransferSide::Target { url: format!("{address}/rooms/{engine}/{name}") }
                    }
                    _ => TransferSide::Standalone(TransferRole::None),
                })
            }
            _ => Ok(TransferSide::Standalone(TransferRole::None)),
        }
    }

    fn bootstrap_side(&self, fields: &RequestFields) -> Result<TransferSide, ErrorResponse> {
        let Some(room) = fields.whole("bootstrap_room")? else {
            let message = "Invalid request: Disaggregated request received without bootstrap room id.";
            return Err(ErrorResponse::bad_request(message, Some("bootstrap_room")));
        };
        let host = fields.text("bootstrap_host")?.unwrap_or_default();
        let port = fields.whole("bootstrap_port")?.unwrap_or_default();
        match self.role {
            WorkerRole::Prefill if port != i64::from(self.bootstrap.port()) => {
                Err(ErrorResponse::bad_request(format!("the bootstrap server listens at {}", self.bootstrap), None))
            }
            WorkerRole::Prefill => Ok(TransferSide::Source { room: room.to_string() }),
            WorkerRole::Decode | WorkerRole::Hybrid => {
                Ok(TransferSide::Target { url: format!("http://{host}:{port}/rooms/any/{room}") })
            }
        }
    }

    /// Returns a request's transfer role, once the other leg has progressed far enough.
    pub(crate) async fn resolve_transfer(&self, part: &TransferSide) -> Result<TransferRole, ErrorResponse> {
        match part {
            TransferSide::Standalone(transfer) => Ok(transfer.clone()),
            TransferSide::Source { .. } => Ok(TransferRole::Produce),
            TransferSide::Target { url } => {
                let sent = self.client.get(url).timeout(self.timeout).send().await;
                let response =
                    sent.and_then(reqwest::Response::error_for_status).map_err(|_| ErrorResponse::internal())?;
                let params: Value = response.json().await.map_err(|_| ErrorResponse::internal())?;
                Ok(transfer_of(params.as_object()))
            }
        }
    }

    /// Returns the transfer parameters of a complete answer. SGLang's source leg ends only once the target has taken
    /// the KV.
    pub(crate) async fn answer_params(
        self: &Arc<Self>,
        part: &TransferSide,
        (handoff, own): (Option<&HandoffOffer>, &SideChannelIdentity),
    ) -> Result<Value, ErrorResponse> {
        let params = handoff.map_or(Value::Null, |handoff| params_of(handoff, own));
        let TransferSide::Source { room } = part else { return Ok(params) };
        if params.is_null() {
            return Err(ErrorResponse::internal());
        }
        let (rooms, room) = (self.rooms.clone(), room.clone());
        let offered = async move { rooms.offer(&room, params).await };
        if self.connector == KvConnector::Sglang {
            return offered.await.then_some(Value::Null).ok_or_else(ErrorResponse::internal);
        }
        tokio::spawn(offered);
        Ok(Value::Null)
    }
}
