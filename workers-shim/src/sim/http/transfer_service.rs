//! Transfers whose legs meet at the source's bootstrap server, as SGLang's and Mooncake's do, and what they refuse.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use engine_model::{HandoffOffer, TransferRole};
use serde_json::Value;
use vocabulary::WorkerRole;

use super::errors::ErrorResponse;
use super::fields::RequestFields;
use super::transfer_fields::{SideChannelIdentity, bidirectional_transfer_of, params_of, transfer_of};
use crate::engine_api::KvConnector;
use crate::sim::bootstrap_rooms::BootstrapRooms;

/// How a simulated worker hands KV over.
pub(crate) struct TransferService {
    pub(crate) connector: KvConnector,
    pub(crate) role: WorkerRole,
    /// Where its bootstrap server listens.
    pub(crate) bootstrap: SocketAddr,
    pub(crate) rooms: BootstrapRooms,
    pub(crate) client: reqwest::Client,
    pub(crate) timeout: Duration,
}

/// What a request has to do with others.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum TransferSide {
    /// Nothing, or what its parameters say by themselves.
    Standalone(TransferRole),
    /// It computes for the leg that comes to this room.
    Source { room: String },
    /// It fetches what is computed for this room.
    Target {
        /// Where the source is asked for it.
        url: String,
    },
}

impl TransferService {
    /// What a request's fields mean here.
    pub(crate) fn side_of(&self, fields: &RequestFields) -> Result<TransferSide, ErrorResponse> {
        let params = fields.object("kv_transfer_params")?;
        match (self.connector, params) {
            (KvConnector::Nixl, params) => Ok(TransferSide::Standalone(transfer_of(params))),
            (KvConnector::Bidirectional, params) => Ok(TransferSide::Standalone(bidirectional_transfer_of(params))),
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

    /// The transfer of a request, once its other leg is as far.
    pub(crate) async fn resolve_transfer(&self, part: &TransferSide) -> Result<TransferRole, ErrorResponse> {
        match part {
            TransferSide::Standalone(transfer) => Ok(transfer.clone()),
            TransferSide::Source { .. } => Ok(TransferRole::Produce),
            TransferSide::Target { url } => {
                let asked = self.client.get(url).timeout(self.timeout).send().await;
                let told =
                    asked.and_then(reqwest::Response::error_for_status).map_err(|_| ErrorResponse::internal())?;
                let params: Value = told.json().await.map_err(|_| ErrorResponse::internal())?;
                Ok(transfer_of(params.as_object()))
            }
        }
    }

    /// What a whole answer says of its transfer. SGLang's source ends once somebody came for what it computed.
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
