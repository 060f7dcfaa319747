//! One of our nodes as a process: the ledger behind a gRPC interface like etcd's.
//!
//! A write claims a session or releases it. Both change the ledger, and both are answered once they are durable on a
//! quorum and applied.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use ledger::{
    ClaimOwner, Command, OpenSession, Outcome, OwnershipSubject, RegisterWorker, ReleaseOwner, WorkerKind, WorkerSpec,
};
use ownership::{ClusterOptions, Options, OwnershipDirectory};
use tokio::net::TcpListener;
use vocabulary::{DpRank, Incarnation, Micros, ModelId, NodeId, Owner, SessionId, TenantId, WorkerId, WorkerRole};

use crate::process::say;
use crate::{LedgerBenchError, load, rpc};

/// One write over gRPC; the body has the client and its counter in etcd's key format.
pub(crate) const WRITE_METHOD: &str = "/bench/Write";
/// The same writes from inside the process, as a router does them; the body has the number of clients and the
/// milliseconds.
pub(crate) const EMBEDDED_METHOD: &str = "/bench/Embedded";
/// Makes this many nodes voters and creates what the writes need.
pub(crate) const PREPARE_METHOD: &str = "/bench/Prepare";

const READY_TIMEOUT: Duration = Duration::from_secs(60);

/// Maximum number of clients.
const MAX_CLIENTS: u64 = 1_024;

/// The worker that claims.
pub(crate) const OWNER: Owner = Owner { worker: WorkerId(1), incarnation: Incarnation(1), rank: DpRank(0) };

/// Serves until the process is killed. Arguments: data directory, peer address, and the node to join.
pub(crate) async fn run(arguments: &[String]) -> Result<(), LedgerBenchError> {
    let [folder, listen, join @ ..] = arguments else {
        return Err(LedgerBenchError::Usage("node DIR ADDR [ADDR]".into()));
    };
    let peering = ClusterOptions { listen: Some(listen.clone()), join: join.to_vec(), ..ClusterOptions::default() };
    let options = Options { peering, ..Options::new(folder) };
    let directory = OwnershipDirectory::open(options).await.map_err(LedgerBenchError::ledger)?;
    let directory = Arc::new(directory);
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.map_err(LedgerBenchError::system("listen"))?;
    let address = listener.local_addr().map_err(LedgerBenchError::system("listen"))?;
    say(&format!("ready {address}"))?;
    rpc::serve(listener, move |path, message| answer(directory.clone(), path, message)).await;
    Ok(())
}

async fn answer(directory: Arc<OwnershipDirectory>, path: String, message: Bytes) -> Result<Bytes, LedgerBenchError> {
    match path.as_str() {
        WRITE_METHOD => {
            let (client, _count) = numbers(&message)?;
            write(&directory, client).await?;
            Ok(Bytes::new())
        }
        EMBEDDED_METHOD => {
            let (clients, millis) = numbers(&message)?;
            let write = move |client, _count| {
                let directory = directory.clone();
                async move { write(&directory, client).await }
            };
            let measured = load::run(clients, Duration::from_millis(millis), write).await?;
            Ok(serde_json::to_vec(&measured).expect("numbers make JSON").into())
        }
        PREPARE_METHOD => prepare(&directory, numbers(&message)?.0).await.map(|()| Bytes::new()),
        other => Err(LedgerBenchError::Usage(other.into())),
    }
}

fn numbers(message: &[u8]) -> Result<(u64, u64), LedgerBenchError> {
    let Some(rpc::ProtobufField::Bytes(bytes)) = rpc::field(message, 1) else {
        return Err(LedgerBenchError::Usage("no key".into()));
    };
    let both =
        bytes.try_into().map(u128::from_be_bytes).map_err(|_| LedgerBenchError::Usage("a key of 16 bytes".into()))?;
    Ok(((both >> 64) as u64, both as u64))
}

/// Performs one durable write.
async fn write(directory: &OwnershipDirectory, client: u64) -> Result<(), LedgerBenchError> {
    let id = SessionId(u128::from(client % MAX_CLIENTS));
    let view = directory.view();
    let session = view.session(id).ok_or_else(|| LedgerBenchError::Usage("not prepared".into()))?;
    let subject = OwnershipSubject::Session(id);
    let command = match session.owner {
        None => Command::ClaimOwner(ClaimOwner { subject, owner: OWNER }),
        Some(owner) => Command::Release(ReleaseOwner { subject, owner, seen: session.epoch }),
    };
    drop(view);
    match submit(directory, command).await? {
        Outcome::Granted { .. } | Outcome::Done => Ok(()),
        other => Err(LedgerBenchError::Answer { target: "the ledger".into(), got: format!("{other:?}") }),
    }
}

/// Submits a command and waits for its outcome.
pub(crate) async fn submit(directory: &OwnershipDirectory, command: Command) -> Result<Outcome, LedgerBenchError> {
    let ticket = directory.submit(command).map_err(|error| LedgerBenchError::Usage(error.to_string()))?;
    ticket.await.map_err(|error| LedgerBenchError::Usage(error.to_string()))
}

/// Command that registers the worker which owns all sessions.
pub(crate) fn register() -> Command {
    Command::RegisterWorker(RegisterWorker {
        worker: OWNER.worker,
        incarnation: OWNER.incarnation,
        spec: WorkerSpec {
            endpoint: "http://worker".into(),
            role: WorkerRole::Hybrid,
            kind: WorkerKind::Engine,
            models: Arc::from([ModelId::from("bench")]),
            ranks: 1,
        },
        ttl: Micros::of(Duration::from_secs(86_400)),
    })
}

async fn prepare(directory: &OwnershipDirectory, nodes: u64) -> Result<(), LedgerBenchError> {
    let deadline = Instant::now() + READY_TIMEOUT;
    while (directory.members().len() as u64) < nodes {
        if Instant::now() > deadline {
            return Err(LedgerBenchError::Usage(format!("{} members", directory.members().len())));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let others = (2..=nodes).map(NodeId);
    if nodes > 1 {
        directory.promote(others).await.map_err(|error| LedgerBenchError::Usage(error.to_string()))?;
    }
    submit(directory, register()).await?;
    let open = |session| {
        let (tenant, model) = (TenantId::default(), ModelId::from("bench"));
        Command::OpenSession(OpenSession { session: SessionId(session), tenant, model, parent: None })
    };
    submit(directory, Command::Batch((0..u128::from(MAX_CLIENTS)).map(open).collect())).await.map(drop)
}
