//! Start and stop of a simulated worker.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::http::HeaderValue;
use axum::middleware::map_response;
use axum::response::Response;
use engine_model::Engine;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use vocabulary::WorkerRole;

use super::SimStartError;
use super::bootstrap_rooms::BootstrapRooms;
use super::clock::EngineClock;
use super::codec::TextCodec;
use super::detokenizer::token_generator_of;
use super::driver::EngineDriver;
use super::event_frames::default_topic;
use super::http::{AdapterNames, KvTransferResolver, MutableSimState, SideChannelIdentity, SimState, routes};
use super::publisher::{EventEndpoints, EventPublisher};
use super::side_channel::{self, KvProducer};
use super::sim_options::{SimOptions, TransferOptions};

const MAX_CONNECTIONS: usize = 4096;
/// Timeout for a client's request headers.
const HEADER_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a stop waits for running answers.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// Response header with the address of the worker that answered. Real engines have none like it.
pub const WORKER_HEADER: &str = "x-sim-worker";

/// A running simulated worker. Dropping it kills it: connections break as if the process had died.
pub struct SimWorker {
    address: SocketAddr,
    endpoints: EventEndpoints,
    app: Arc<SimState>,
    stop: watch::Sender<()>,
    server: JoinHandle<()>,
    _tasks: JoinSet<()>,
}

impl SimWorker {
    /// Starts a worker. All sockets are bound when this returns.
    pub async fn start(options: SimOptions, codec: Arc<dyn TextCodec>) -> Result<Self, SimStartError> {
        if !(options.speed_up > 0.0 && options.speed_up.is_finite()) {
            return Err(SimStartError::Option { option: "speed_up", must: "positive" });
        }
        let adapters = AdapterNames::of(&options.model, options.adapters)?;
        let (listener, address) = listen(options.listen).await?;
        let (side, side_address) = listen(options.side_channel).await?;
        let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        let life = started.to_bits() ^ u64::from(address.port());
        let profile = Arc::new(options.profile);
        let engine = Engine::new(profile.clone(), token_generator_of(&*codec)?, life)?;
        let topic = default_topic(address, &options.model);
        let (publisher, sockets, endpoints) = EventPublisher::bind(&options.events, profile.block_size, topic).await?;
        let clock = EngineClock::new(options.speed_up);
        let driver = EngineDriver::new(engine, clock, publisher);
        let identity = SideChannelIdentity { engine: engine_id(life).into(), side_channel: side_address };
        tracing::info!(%address, role = options.role.as_str(), model = options.model, "simulated worker");
        let mut tasks = JoinSet::new();
        tasks.spawn(driver.clone().run());
        tasks.spawn(sockets.run());
        let (fault, reads) = (options.transfer_fault, Arc::default());
        let producer = KvProducer { engine: identity.engine.clone(), driver: driver.clone(), fault, read_count: reads };
        tasks.spawn(side_channel::serve(side, producer));
        let handing = Arc::new(start_transfer_service(&options.handing, options.role, &identity, &mut tasks).await?);
        let app = Arc::new(SimState {
            transfers: handing,
            driver,
            codec,
            identity,
            model: options.model,
            ignores_salts: options.ignores_salts,
            profile,
            endpoints: endpoints.clone(),
            clock,
            started,
            state: MutableSimState::with_adapters(adapters),
        });
        let (stop, stopped) = watch::channel(());
        let routes = with_worker_header(address, routes(app.clone(), options.body_limit));
        let server = tokio::spawn(serve(listener, routes, stopped));
        Ok(Self { address, endpoints, app, stop, server, _tasks: tasks })
    }

    /// Returns its HTTP address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the address of its bootstrap server.
    pub fn bootstrap(&self) -> SocketAddr {
        self.app.transfers.bootstrap
    }

    /// Returns the endpoint of its live events.
    pub fn events_endpoint(&self) -> &str {
        &self.endpoints.events
    }

    /// Returns the endpoint of its replays.
    pub fn replay_endpoint(&self) -> &str {
        &self.endpoints.replay
    }

    /// Returns the number of admin requests it received, on any path.
    pub fn admin_requests(&self) -> u64 {
        self.app.admin_requests()
    }

    /// Returns how often its driver woke up: an idle engine should cause no wake-ups.
    pub fn wakeups(&self) -> u64 {
        self.app.driver.wakeups()
    }

    /// Kills the engine while the server keeps running, as when an engine core crashes.
    pub fn break_engine(&self) {
        self.app.driver.with_engine(|engine, now| engine.crash(now));
    }

    /// Stops accepting connections, finishes running answers, and ends.
    pub async fn stop(mut self) {
        drop(std::mem::replace(&mut self.stop, watch::channel(()).0));
        let _ = tokio::time::timeout(STOP_TIMEOUT, &mut self.server).await;
    }
}

impl Drop for SimWorker {
    fn drop(&mut self) {
        self.server.abort();
    }
}

/// Binds and serves the bootstrap server.
async fn start_transfer_service(
    options: &TransferOptions,
    role: WorkerRole,
    own: &SideChannelIdentity,
    tasks: &mut JoinSet<()>,
) -> Result<KvTransferResolver, SimStartError> {
    let TransferOptions { dialect: spoken, patience, .. } = *options;
    let (listener, bootstrap) = listen(options.bootstrap).await?;
    let bootstrap_rooms = BootstrapRooms::new(own.engine.clone(), patience);
    let served = axum::serve(listener, bootstrap_rooms.clone().routes());
    tasks.spawn(async move {
        if let Err(error) = served.await {
            tracing::debug!(%error, "bootstrap server");
        }
    });
    // An error means that a provider is already installed, which is fine.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let client = reqwest::Client::builder().no_proxy().tls_certs_only([]).build();
    let client = client
        .map_err(|_| SimStartError::Option { option: "kv_connector", must: "used where HTTP clients can be made" })?;
    Ok(KvTransferResolver { connector: spoken, role, bootstrap, rooms: bootstrap_rooms, client, timeout: patience })
}

/// Adds the worker's address to every response, so that a client can tell where a proxy sent its request.
fn with_worker_header(address: SocketAddr, routes: Router) -> Router {
    let name = HeaderValue::try_from(address.to_string()).expect("an address is plain text");
    routes.layer(map_response(move |mut response: Response| {
        response.headers_mut().insert(WORKER_HEADER, name.clone());
        std::future::ready(response)
    }))
}

async fn listen(address: SocketAddr) -> Result<(TcpListener, SocketAddr), SimStartError> {
    let wrong = |source| SimStartError::Listen { address, source };
    let listener = TcpListener::bind(address).await.map_err(wrong)?;
    let bound = listener.local_addr().map_err(wrong)?;
    Ok((listener, bound))
}

fn engine_id(life: u64) -> String {
    let a = xxhash_rust::xxh3::xxh3_64_with_seed(&life.to_le_bytes(), 1);
    let b = xxhash_rust::xxh3::xxh3_64_with_seed(&life.to_le_bytes(), 2);
    format!("{:08x}-{:04x}-{:04x}-{:04x}-{:012x}", a >> 32, a >> 16 & 0xffff, a & 0xffff, b >> 48, b & 0xffff_ffff_ffff)
}

async fn serve(listener: TcpListener, routes: Router, mut stopped: watch::Receiver<()>) {
    let graceful = GracefulShutdown::new();
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept(), if connections.len() < MAX_CONNECTIONS => match accepted {
                Ok((stream, _)) => drop(connections.spawn(serve_one(stream, routes.clone(), graceful.watcher()))),
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            },
            Some(_) = connections.join_next() => {}
            _ = stopped.changed() => break,
        }
    }
    drop(listener);
    graceful.shutdown().await;
    while connections.join_next().await.is_some() {}
}

async fn serve_one(stream: TcpStream, routes: Router, watcher: hyper_util::server::graceful::Watcher) {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "TCP_NODELAY");
    }
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(routes));
    if let Err(error) = watcher.watch(connection).await {
        tracing::debug!(%error, "connection");
    }
}
