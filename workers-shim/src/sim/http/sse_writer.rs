//! Server-sent events: the growing choices are formatted by a formatter for each API, and everything that is ready goes
//! out in one write. When the client disconnects, the stream is dropped, which cancels the engine's requests.

use std::convert::Infallible;

use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::Response;
use futures::stream::{self, BoxStream, SelectAll, Stream, StreamExt};
use serde::Serialize;
use serde_json::Value;

use super::choice::{AnswerDelta, ChoiceStream};
use super::errors::ErrorResponse;
use super::usage::UsageTotals;

/// Formats a growing answer for one API. Each method returns complete events.
pub(crate) trait StreamFormatter: Send + 'static {
    /// Called before the first part.
    fn open(&mut self) -> String;
    /// Formats a part of the choice at `index`.
    fn part(&mut self, index: u32, part: &AnswerDelta) -> String;
    /// Called after the last part.
    fn close(&mut self, totals: &UsageTotals) -> String;
    /// Reports an error in place of the rest; OpenAI's format by default.
    fn fail(&mut self, error: &ErrorResponse) -> String {
        data(&error.body()) + "data: [DONE]\n\n"
    }
}

/// Formats an event without a name.
pub(crate) fn data(value: &impl Serialize) -> String {
    format!("data: {}\n\n", serde_json::to_string(value).expect("answers are texts, numbers and lists of them"))
}

pub(crate) fn named(name: &str, value: &Value) -> String {
    format!("event: {name}\ndata: {value}\n\n")
}

type IndexedDelta = (u32, Result<AnswerDelta, ErrorResponse>);

struct AnswerStream<S> {
    choices: SelectAll<BoxStream<'static, IndexedDelta>>,
    script: S,
    usage: UsageTotals,
    per_prompt: u32,
    opened: bool,
    is_finished: bool,
}

/// Streams `choices`; each group of `per_prompt` choices answers one prompt.
pub(crate) fn stream_answer(
    choices: Vec<ChoiceStream>,
    per_prompt: u32,
    totals: UsageTotals,
    script: impl StreamFormatter,
) -> Response {
    let choices = (0u32..).zip(choices).map(|(index, choice)| indexed_deltas(index, choice).boxed());
    let telling = AnswerStream {
        choices: stream::select_all(choices),
        script,
        usage: totals,
        per_prompt: per_prompt.max(1),
        opened: false,
        is_finished: false,
    };
    let body = stream::unfold(telling, |mut telling| async move {
        let text = telling.next().await?;
        Some((Ok::<_, Infallible>(Bytes::from(text)), telling))
    });
    Response::builder()
        .header(header::CONTENT_TYPE, "text/event-stream; charset=utf-8")
        .body(Body::from_stream(body))
        .expect("a fixed header is valid")
}

fn indexed_deltas(index: u32, choice: ChoiceStream) -> impl Stream<Item = IndexedDelta> + Send {
    stream::unfold(choice, move |mut choice| async move {
        let part = choice.next().await?;
        Some(((index, part), choice))
    })
}

impl<S: StreamFormatter> AnswerStream<S> {
    async fn next(&mut self) -> Option<String> {
        if self.is_finished {
            return None;
        }
        let mut text = String::new();
        match self.choices.next().await {
            None => {
                self.is_finished = true;
                text += &self.script.close(&self.usage);
            }
            Some((_, Err(fault))) => {
                self.is_finished = true;
                text += &self.script.fail(&fault);
            }
            Some((index, Ok(part))) => {
                if !std::mem::replace(&mut self.opened, true) {
                    text += &self.script.open();
                }
                if let Some(end) = &part.end {
                    self.usage.add(index % self.per_prompt, end);
                }
                text += &self.script.part(index, &part);
            }
        }
        Some(text)
    }
}
