//! Tests of a batch whose answer is lost while the ledger forgets its client: it is executed once, and later batches
//! are sent as a new client.

use std::sync::Arc;
use std::time::Duration;

use ledger::{Command, LedgerLimits, OpenSession, Outcome, Submission};
use tokio::sync::{mpsc, oneshot};
use vocabulary::{ClientId, ClientSerial, ModelId, NodeId, SessionId, TenantId};

use crate::command_queue::{CommandTicket, QueuedCommand, Urgency};
use crate::command_writer::CommandWriter;
use crate::error::SubmitError;
use crate::node_core::{NodeCore, NodeCoreParts};
use crate::proposal::{ProposalBatch, ReturnedSubmissions, SubmissionFate};
use crate::{Options, OwnershipDirectory};

const SESSION: SessionId = SessionId(7);

/// Passes submissions to the real proposer and returns their outcomes.
async fn propose(core: &NodeCore, submissions: Vec<Submission>) -> Vec<Outcome> {
    let (answer, answered) = oneshot::channel();
    core.proposals.send(ProposalBatch { submissions, answer }).await.unwrap();
    answered.await.unwrap().unwrap()
}

/// Closes the session, and opens so many other clients that the ledger forgets every earlier one.
async fn forget_client(core: &NodeCore) {
    let other = |n: u32| ClientId(1 << 100 | u128::from(n));
    let open = |n| Submission { client: other(n), serial: ClientSerial(0), command: Command::OpenClient(NodeId(1)) };
    let close = Submission { client: other(0), serial: ClientSerial(1), command: Command::CloseSession(SESSION) };
    let others = (0..LedgerLimits::default().clients).map(open).chain([close]);
    assert!(propose(core, others.collect()).await.iter().all(|outcome| *outcome == Outcome::Done));
}

/// Passes batches to the real proposer, and drops the first answer to a batch that opens the session.
async fn drop_first_answer(core: Arc<NodeCore>, mut asked: mpsc::Receiver<ProposalBatch>) {
    let mut is_lost = false;
    while let Some(ProposalBatch { submissions, answer }) = asked.recv().await {
        let opens = submissions.iter().any(|submission| matches!(submission.command, Command::OpenSession(_)));
        let outcomes = propose(&core, submissions.clone()).await;
        if opens && !is_lost {
            is_lost = true;
            assert!(core.view().session(SESSION).is_some(), "the first attempt was executed: {outcomes:?}");
            forget_client(&core).await;
            drop(answer.send(Err(ReturnedSubmissions { submissions, fate: SubmissionFate::Unknown })));
        } else {
            drop(answer.send(Ok(outcomes)));
        }
    }
}

#[tokio::test]
async fn retrying_a_first_batch_of_a_forgotten_client_does_not_execute_twice() {
    check_retry_of_forgotten_client(&[]).await;
}

#[tokio::test]
async fn a_client_with_an_unknown_outcome_sends_no_further_batches() {
    // The client is open by then.
    check_retry_of_forgotten_client(&[Command::CloseSession(SESSION)]).await;
}

/// Sends the commands, then a batch whose answer is lost while its client is forgotten, then one more.
async fn check_retry_of_forgotten_client(before: &[Command]) {
    let folder = tempfile::tempdir().unwrap();
    let directory = OwnershipDirectory::open(Options::new(folder.path())).await.unwrap();
    let real = directory.core();
    let (proposals, asked) = mpsc::channel(1);
    let (queue, mut queued) = mpsc::channel(4);
    let parts = NodeCoreParts {
        raft: real.raft.clone(),
        registry: real.registry.clone(),
        observer: real.observer.clone(),
        log: real.log.clone(),
        folder: real.folder.clone(),
        proposals,
        silence_timeout: real.silence_timeout(),
        seeds: Vec::new(),
    };
    let core = NodeCore::new(parts, queue.clone());
    core.update_quorum();
    let proposer = tokio::spawn(drop_first_answer(real.clone(), asked));
    let writer = CommandWriter::new(core.clone(), Duration::from_secs(60));
    let writer = tokio::spawn(async move { writer.run(&mut queued).await });
    let submit = |command| {
        let (answer, ticket) = CommandTicket::new();
        queue.try_send(QueuedCommand::new(command, Urgency::Immediate, answer).unwrap()).unwrap();
        ticket
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
