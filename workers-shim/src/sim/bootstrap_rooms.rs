//! Bootstrap server of a simulated source: tells a target which blocks to fetch, by the room name that both legs carry.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::routing::get;
use axum::{Json, Router};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::watch;

/// Progress of the legs of one transfer.
#[derive(Clone, PartialEq, Debug, Default)]
enum BootstrapRoomState {
    #[default]
    Open,
    /// The source has computed the prompt.
    Offered(Value),
    /// The target has received the parameters.
    Taken,
}

/// The rooms in which the legs of transfers meet.
#[derive(Clone)]
pub(crate) struct BootstrapRooms {
    engine: Arc<str>,
    /// How long one leg waits for the other.
    timeout: Duration,
    rooms: Arc<Mutex<HashMap<String, watch::Sender<BootstrapRoomState>>>>,
}

impl BootstrapRooms {
    pub(crate) fn new(engine: Arc<str>, timeout: Duration) -> Self {
        Self { engine, timeout, rooms: Arc::default() }
    }

    /// Offers what the source computed; returns whether the target took it in time.
    pub(crate) async fn offer(&self, name: &str, parameters: Value) -> bool {
        let room = self.room(name);
        room.send_replace(BootstrapRoomState::Offered(parameters));
        self.wait_for_state(name, |stage| *stage == BootstrapRoomState::Taken).await.is_some()
    }

    async fn take_offer(&self, name: &str) -> Option<Value> {
        let BootstrapRoomState::Offered(parameters) =
            self.wait_for_state(name, |stage| matches!(stage, BootstrapRoomState::Offered(_))).await?
        else {
            return None;
        };
        let room = self.rooms.lock().remove(name)?;
        room.send_replace(BootstrapRoomState::Taken);
        Some(parameters)
    }

    fn room(&self, name: &str) -> watch::Sender<BootstrapRoomState> {
        self.rooms.lock().entry(name.to_owned()).or_default().clone()
    }

    async fn wait_for_state(
        &self,
        name: &str,
        wanted: impl FnMut(&BootstrapRoomState) -> bool,
    ) -> Option<BootstrapRoomState> {
        let mut stage = self.room(name).subscribe();
        let reached = tokio::time::timeout(self.timeout, stage.wait_for(wanted)).await;
        let reached = reached.ok().and_then(|reached| reached.ok().map(|stage| stage.clone()));
        if reached.is_none() {
            self.rooms.lock().remove(name);
        }
        reached
    }

    /// Returns the HTTP routes. `/query` has Mooncake's format; the protocol between engines is private to each of
    /// them.
    pub(crate) fn routes(self) -> Router {
        Router::new().route("/query", get(query)).route("/rooms/{engine}/{name}", get(take)).with_state(self)
    }
}

async fn query(State(rooms): State<BootstrapRooms>) -> Json<Value> {
    Json(json!({"0": {"engine_id": rooms.engine, "worker_addr": {}}}))
}

async fn take(
    State(rooms): State<BootstrapRooms>,
    Path((engine, name)): Path<(String, String)>,
) -> Result<Json<Value>, StatusCode> {
    if engine != *rooms.engine && engine != "any" {
        return Err(StatusCode::CONFLICT);
    }
    rooms.take_offer(&name).await.map(Json).ok_or(StatusCode::REQUEST_TIMEOUT)
}
