use serde_json::json;

use super::*;
use crate::app_state::AppState;
use crate::legs::Legs;
use crate::pipeline::execute::execute;
use crate::pipeline::plan;
use crate::pipeline::planning::{PlanVerdict, Planning};
use crate::pipeline::tests::classified_step;
use crate::testing::{StubWorker, start_router};

/// Returns the stream of an answer that the worker has begun.
async fn begun_answer(app_state: &Arc<AppState>) -> ClientEventStream {
    let body = json!({"model": "tiny", "prompt": "text", "behave": "stream", "stream": true});
    let planning = Planning::first(classified_step(app_state, GenerationEndpoint::Completions, &body).await);
    let planned =
        planning.plan(&app_state.pipeline.plan, |step, failed| plan::plan(&app_state.pipeline.plan, step, failed));
    let Ok(PlanVerdict::Start(dispatched)) = planned else { panic!("it starts") };
    let legs = Legs::of(&app_state.workers, &dispatched.step);
    let started =
        execute(&app_state.pipeline.execute, (&dispatched.step, &dispatched.planned.plan), legs).await.unwrap();
    let (opened, streaming) = dispatched.started(&app_state.pipeline.stream.reporter, started);
    let LegResponse::Stream(answer, _) = opened else { panic!("it is a stream") };
    let (head, body) = answer.into_parts();
    ClientEventStream::new(&app_state.pipeline.stream, (head.status, body), streaming, Span::none())
}

#[tokio::test]
async fn an_answer_with_a_panic_ends_as_broken_and_is_recorded() {
    let worker = StubWorker::start("one", "tiny").await;
    let router = start_router(&[&worker], &[]).await;
    let mut events = begun_answer(&router.gateway).await;
    let Poll::Ready(Some(Ok(told))) = events.guarded(|_| panic!("a bug")) else { panic!("the client is told") };
    assert!(String::from_utf8(told.to_vec()).unwrap().contains("internal"), "{told:?}");
    let receipts = || router.gateway.decisions.receipts.newest(10, |_| true);
    assert_eq!(
        receipts().iter().map(|receipt| receipt.observed.unwrap().outcome).collect::<Vec<_>>(),
        [RequestOutcome::Interrupted]
    );
    assert!(matches!(
        events.guarded(|events| events.poll_chunk(&mut Context::from_waker(std::task::Waker::noop()))),
        Poll::Ready(None)
    ));
    drop(events);
    assert_eq!(receipts().len(), 1, "it ends once");
}

#[test]
fn events_that_arrived_together_leave_as_one_piece() {
    let mut ready = ReadyEvents::default();
    assert_eq!(ready.take_joined(), None);
    for piece in ["data: a\n\n", "", "data: b\n\n"] {
        ready.push(Bytes::from_static(piece.as_bytes()));
    }
    assert_eq!(ready.take_joined().as_deref(), Some(&b"data: a\n\ndata: b\n\n"[..]));
    assert_eq!((ready.bytes, ready.take_joined()), (0, None));
}

#[test]
fn joined_events_are_bounded_and_stay_in_order() {
    let mut ready = ReadyEvents::default();
    let pieces: Vec<Bytes> = (0..9_u8).map(|byte| vec![byte; MAX_JOINED_BYTES / 3].into()).collect();
    pieces.iter().for_each(|piece| ready.push(piece.clone()));
    let long = Bytes::from(vec![9; 2 * MAX_JOINED_BYTES]);
    ready.push(long.clone());
    let joined: Vec<Bytes> = std::iter::from_fn(|| ready.take_joined()).collect();
    assert_eq!(joined.iter().map(Bytes::len).max(), Some(long.len()));
    assert_eq!((joined.len(), joined[3].as_ptr()), (4, long.as_ptr()), "a long piece is not copied");
    assert_eq!(joined.concat(), [pieces.concat(), long.to_vec()].concat());
    assert_eq!(ready.bytes, 0);
}
