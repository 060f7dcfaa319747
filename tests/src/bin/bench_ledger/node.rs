//! One of our nodes as a process: the ledger, and the same door in front of it that etcd has.
//!
//! A write is a claim of a session, or giving it back: both change the ledger, and both are answered once they are
//! durable on a quorum and applied.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use ledger::{ClaimOwner, Command, OpenSession, Outcome, RegisterWorker, Release, Subject, WorkerKind, WorkerSpec};
use ownership::{Directory, Options, Peering};
use tokio::net::TcpListener;
use vocabulary::{DpRank, Incarnation, Micros, ModelId, NodeId, Owner, Role, SessionId, TenantId, WorkerId};

use crate::{BenchError, load, rpc};

/// A write through the door: who writes, and its count, as etcd's key has them.
pub(crate) const WRITE: &str = "/bench/Write";
/// The same writes from inside the process, as a router does them: how many clients, and for how many milliseconds.
pub(crate) const EMBEDDED: &str = "/bench/Embedded";
/// Makes voters of so many nodes, and prepares what the writes need.
pub(crate) const PREPARE: &str = "/bench/Prepare";

const READY_WITHIN: Duration = Duration::from_secs(60);

/// The most clients.
const SESSIONS: u64 = 1_024;

/// The worker that claims.
pub(crate) const OWNER: Owner = Owner { worker: WorkerId(1), incarnation: Incarnation(1), rank: DpRank(0) };

/// Serves until it is killed: a data directory, where other nodes call, and whom to join.
pub(crate) async fn run(arguments: &[String]) -> Result<(), BenchError> {
    let [folder, listen, join @ ..] = arguments else { return Err(BenchError::Usage("node DIR ADDR [ADDR]".into())) };
    let peering = Peering { listen: Some(listen.clone()), join: join.to_vec(), ..Peering::default() };
    let options = Options { peering, ..Options::new(folder) };
    let directory = Directory::open(options).await.map_err(BenchError::ledger)?;
    let directory = Arc::new(directory);
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.map_err(BenchError::system("listen"))?;
    let address = listener.local_addr().map_err(BenchError::system("listen"))?;
    crate::say(&format!("ready {address}"))?;
    rpc::serve(listener, move |path, message| answer(directory.clone(), path, message)).await;
    Ok(())
}

async fn answer(directory: Arc<Directory>, path: String, message: Bytes) -> Result<Bytes, BenchError> {
    match path.as_str() {
        WRITE => {
            let (client, _count) = numbers(&message)?;
            write(&directory, client).await?;
            Ok(Bytes::new())
        }
        EMBEDDED => {
            let (clients, millis) = numbers(&message)?;
            let write = move |client, _count| {
                let directory = directory.clone();
                async move { write(&directory, client).await }
            };
            let measured = load::run(clients, Duration::from_millis(millis), write).await?;
            Ok(serde_json::to_vec(&measured).expect("numbers make JSON").into())
        }
        PREPARE => prepare(&directory, numbers(&message)?.0).await.map(|()| Bytes::new()),
        other => Err(BenchError::Usage(other.into())),
    }
}

fn numbers(message: &[u8]) -> Result<(u64, u64), BenchError> {
    let Some(rpc::Field::Bytes(bytes)) = rpc::field(message, 1) else { return Err(BenchError::Usage("no key".into())) };
    let both = bytes.try_into().map(u128::from_be_bytes).map_err(|_| BenchError::Usage("a key of 16 bytes".into()))?;
    Ok(((both >> 64) as u64, both as u64))
}

/// One durable write.
async fn write(directory: &Directory, client: u64) -> Result<(), BenchError> {
    let id = SessionId(u128::from(client % SESSIONS));
    let view = directory.view();
    let session = view.session(id).ok_or_else(|| BenchError::Usage("not prepared".into()))?;
    let subject = Subject::Session(id);
    let command = match session.owner {
        None => Command::ClaimOwner(ClaimOwner { subject, owner: OWNER }),
        Some(owner) => Command::Release(Release { subject, owner, seen: session.epoch }),
    };
    drop(view);
    match submit(directory, command).await? {
        Outcome::Granted { .. } | Outcome::Done => Ok(()),
        other => Err(BenchError::Answer { target: "the ledger".into(), got: format!("{other:?}") }),
    }
}

/// Submits and waits.
pub(crate) async fn submit(directory: &Directory, command: Command) -> Result<Outcome, BenchError> {
    let ticket = directory.submit(command).map_err(|error| BenchError::Usage(error.to_string()))?;
    ticket.await.map_err(|error| BenchError::Usage(error.to_string()))
}

/// The worker that owns everything.
pub(crate) fn register() -> Command {
    Command::RegisterWorker(RegisterWorker {
        worker: OWNER.worker,
        incarnation: OWNER.incarnation,
        spec: WorkerSpec {
            endpoint: "http://worker".into(),
            role: Role::Hybrid,
            kind: WorkerKind::Engine,
            models: Arc::from([ModelId::from("bench")]),
            ranks: 1,
        },
        ttl: Micros::of(Duration::from_secs(86_400)),
    })
}

async fn prepare(directory: &Directory, nodes: u64) -> Result<(), BenchError> {
    let deadline = Instant::now() + READY_WITHIN;
    while (directory.members().len() as u64) < nodes {
        if Instant::now() > deadline {
            return Err(BenchError::Usage(format!("{} members", directory.members().len())));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let others = (2..=nodes).map(NodeId);
    if nodes > 1 {
        directory.promote(others).await.map_err(|error| BenchError::Usage(error.to_string()))?;
    }
    submit(directory, register()).await?;
    let open = |session| {
        let (tenant, model) = (TenantId::default(), ModelId::from("bench"));
        Command::OpenSession(OpenSession { session: SessionId(session), tenant, model, parent: None })
    };
    submit(directory, Command::Batch((0..u128::from(SESSIONS)).map(open).collect())).await.map(drop)
}
