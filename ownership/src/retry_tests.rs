//! A batch of a writer, whose answer is lost while the ledger forgets the client: it is executed once, and what comes next
//! is sent as a new client.

use std::sync::Arc;
use std::time::Duration;

use ledger::{Command, Limits, OpenSession, Outcome, Submission};
use tokio::sync::{mpsc, oneshot};
use vocabulary::{ClientId, ClientSerial, ModelId, NodeId, SessionId, TenantId};

use crate::core::{Core, Parts};
use crate::error::SubmitError;
use crate::proposer::{Asked, Fate, Returned};
use crate::writer::{Queued, Ticket, Writer};
use crate::{Directory, Options};

const SESSION: SessionId = SessionId(7);

/// Hands submissions to the real proposer; their outcomes.
async fn propose(core: &Core, submissions: Vec<Submission>) -> Vec<Outcome> {
    let (answer, answered) = oneshot::channel();
    core.proposals.send(Asked { submissions, answer }).await.unwrap();
    answered.await.unwrap().unwrap()
}

/// Closes the session, and opens so many other clients that the ledger forgets every earlier one.
async fn forget(core: &Core) {
    let other = |n: u32| ClientId(1 << 100 | u128::from(n));
    let open = |n| Submission { client: other(n), serial: ClientSerial(0), command: Command::OpenClient(NodeId(1)) };
    let close = Submission { client: other(0), serial: ClientSerial(1), command: Command::CloseSession(SESSION) };
    let others = (0..Limits::default().clients).map(open).chain([close]);
    assert!(propose(core, others.collect()).await.iter().all(|outcome| *outcome == Outcome::Done));
}

/// Passes batches on to the real proposer, and loses the answer of the first that carries the session's opening.
async fn lose_one_answer(core: Arc<Core>, mut asked: mpsc::Receiver<Asked>) {
    let mut is_lost = false;
    while let Some(Asked { submissions, answer }) = asked.recv().await {
        let opens = submissions.iter().any(|submission| matches!(submission.command, Command::OpenSession(_)));
        let outcomes = propose(&core, submissions.clone()).await;
        if opens && !is_lost {
            is_lost = true;
            assert!(core.view().session(SESSION).is_some(), "the first attempt was executed: {outcomes:?}");
            forget(&core).await;
            drop(answer.send(Err(Returned { submissions, fate: Fate::Unknown })));
        } else {
            drop(answer.send(Ok(outcomes)));
        }
    }
}

#[tokio::test]
async fn a_first_batch_that_is_tried_again_after_its_client_was_forgotten_is_not_executed_twice() {
    retried_after_its_client_was_forgotten(&[]).await;
}

#[tokio::test]
async fn nothing_more_is_sent_as_a_client_of_which_an_outcome_is_unknown() {
    // The client is open by then.
    retried_after_its_client_was_forgotten(&[Command::CloseSession(SESSION)]).await;
}

/// Sends these, then a batch whose answer is lost while its client is forgotten, then one more.
async fn retried_after_its_client_was_forgotten(before: &[Command]) {
    let folder = tempfile::tempdir().unwrap();
    let directory = Directory::open(Options::new(folder.path())).await.unwrap();
    let real = directory.core();
    let (proposals, asked) = mpsc::channel(1);
    let (queue, mut queued) = mpsc::channel(4);
    let parts = Parts {
        raft: real.raft.clone(),
        registry: real.registry.clone(),
        observer: real.observer.clone(),
        log: real.log.clone(),
        folder: real.folder.clone(),
        proposals,
        patience: real.patience(),
        seeds: Vec::new(),
    };
    let core = Core::new(parts, queue.clone());
    core.look();
    let proposer = tokio::spawn(lose_one_answer(real.clone(), asked));
    let writer = Writer::new(core.clone(), Duration::from_secs(60));
    let writer = tokio::spawn(async move { writer.run(&mut queued).await });
    let submit = |command| {
        let (answer, ticket) = oneshot::channel();
        queue.try_send(Queued::new(command, answer).unwrap()).unwrap();
        Ticket(ticket)
    };
    for command in before {
        assert_eq!(submit(command.clone()).await, Ok(Outcome::Done));
    }
    let (tenant, model) = (TenantId::default(), ModelId::from("m"));
    let open = OpenSession { session: SESSION, tenant, model, parent: None };
    let first = submit(Command::OpenSession(open)).await;
    assert!(real.view().session(SESSION).is_none(), "it was closed meanwhile, and not opened again");
    assert_eq!(first, Err(SubmitError::UnknownOutcome));
    assert_eq!(submit(Command::CloseSession(SESSION)).await, Ok(Outcome::Done), "it goes on as a new client");
    drop(queue);
    core.close_queue();
    writer.await.unwrap();
    drop(core);
    proposer.await.unwrap();
    directory.close().await.unwrap();
}
