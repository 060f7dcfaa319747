//! Server-sent events: choices grow, a script puts them into an API's words, and whatever is ready at once goes out in
//! one write. When the client leaves, the stream is dropped, and the engine's requests with it.

use std::convert::Infallible;

use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::Response;
use futures::stream::{self, BoxStream, SelectAll, Stream, StreamExt};
use serde::Serialize;
use serde_json::Value;

use super::choice::{Choice, Part};
use super::errors::Fault;
use super::totals::Totals;

/// An API's way to tell a growing answer. Each method returns whole events.
pub(crate) trait Script: Send + 'static {
    /// Before the first part.
    fn open(&mut self) -> String;
    /// A part of the choice at `index`.
    fn part(&mut self, index: u32, part: &Part) -> String;
    /// After the last.
    fn close(&mut self, totals: &Totals) -> String;
    /// Instead of the rest; as OpenAI's APIs tell it, where an API has no words of its own.
    fn fail(&mut self, fault: &Fault) -> String {
        data(&fault.body()) + "data: [DONE]\n\n"
    }
}

/// An event without a name.
pub(crate) fn data(value: &impl Serialize) -> String {
    format!("data: {}\n\n", serde_json::to_string(value).expect("answers are texts, numbers and lists of them"))
}

pub(crate) fn named(name: &str, value: &Value) -> String {
    format!("event: {name}\ndata: {value}\n\n")
}

type Told = (u32, Result<Part, Fault>);

struct Telling<S> {
    choices: SelectAll<BoxStream<'static, Told>>,
    script: S,
    totals: Totals,
    per_prompt: u32,
    opened: bool,
    over: bool,
}

/// Stream `choices`, of which each `per_prompt` answer one prompt.
pub(crate) fn stream_answer(choices: Vec<Choice>, per_prompt: u32, totals: Totals, script: impl Script) -> Response {
    let choices = (0u32..).zip(choices).map(|(index, choice)| told(index, choice).boxed());
    let telling = Telling {
        choices: stream::select_all(choices),
        script,
        totals,
        per_prompt: per_prompt.max(1),
        opened: false,
        over: false,
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

fn told(index: u32, choice: Choice) -> impl Stream<Item = Told> + Send {
    stream::unfold(choice, move |mut choice| async move {
        let part = choice.next().await?;
        Some(((index, part), choice))
    })
}

impl<S: Script> Telling<S> {
    async fn next(&mut self) -> Option<String> {
        if self.over {
            return None;
        }
        let mut text = String::new();
        match self.choices.next().await {
            None => {
                self.over = true;
                text += &self.script.close(&self.totals);
            }
            Some((_, Err(fault))) => {
                self.over = true;
                text += &self.script.fail(&fault);
            }
            Some((index, Ok(part))) => {
                if !std::mem::replace(&mut self.opened, true) {
                    text += &self.script.open();
                }
                if let Some(end) = &part.end {
                    self.totals.add(index % self.per_prompt, end);
                }
                text += &self.script.part(index, &part);
            }
        }
        Some(text)
    }
}
