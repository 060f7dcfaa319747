//! One answer as it grows: tokens to text, stop texts, and how it ended.

use std::sync::Arc;

use engine_model::{Finish, FinishReason};
use serde_json::{Value, json};

use crate::sim::codec::TextCodec;
use crate::sim::driver::{Ticket, Update};
use crate::sim::speech::Detokenizer;

use super::errors::Fault;

/// A piece of an answer.
#[derive(Default)]
pub(crate) struct Part {
    pub(crate) text: String,
    pub(crate) ids: Vec<u32>,
    pub(crate) end: Option<End>,
}

pub(crate) struct End {
    pub(crate) reason: &'static str,
    /// The stop text, if one ended it.
    pub(crate) stop: Value,
    pub(crate) finish: Finish,
}

/// An answer under way.
pub(crate) struct Choice {
    ticket: Ticket,
    text: Detokenizer,
    stops: Vec<String>,
    /// Text that may be the beginning of a stop text.
    held: String,
    /// The stop text that was met; the engine has been told.
    stopped: Option<String>,
    over: bool,
}

impl Choice {
    pub(crate) fn new(ticket: Ticket, codec: Arc<dyn TextCodec>, stops: Vec<String>) -> Self {
        let text = Detokenizer::new(codec);
        Self { ticket, text, stops, held: String::new(), stopped: None, over: false }
    }

    /// What was said since the last call; none after the end.
    pub(crate) async fn next(&mut self) -> Option<Result<Part, Fault>> {
        if self.over {
            return None;
        }
        let updates = self.ticket.updates().await;
        let mut part = Part::default();
        if updates.is_empty() {
            self.over = true;
            return Some(Err(Fault::internal()));
        }
        for update in updates {
            match update {
                Update::Token(id) => self.token(id, &mut part),
                Update::Finished(finish) => return Some(self.finish(finish, part)),
            }
        }
        Some(Ok(part))
    }

    /// Everything until the end.
    pub(crate) async fn whole(mut self) -> Result<(Part, End), Fault> {
        let mut all = Part::default();
        while let Some(part) = self.next().await {
            let part = part?;
            all.text += &part.text;
            all.ids.extend(part.ids);
            if let Some(end) = part.end {
                return Ok((all, end));
            }
        }
        Err(Fault::internal())
    }

    fn token(&mut self, id: u32, part: &mut Part) {
        if self.stopped.is_some() {
            return;
        }
        part.ids.push(id);
        let said = self.text.push(id);
        self.say(&said, part);
    }

    fn say(&mut self, said: &str, part: &mut Part) {
        self.held += said;
        if let Some((at, stop)) = self.met() {
            self.held.truncate(at);
            self.stopped = Some(stop);
            self.ticket.stop();
        }
        let safe = if self.stopped.is_some() { self.held.len() } else { self.held.len() - self.risky() };
        part.text.extend(self.held.drain(..safe));
    }

    /// The first stop text in what is held.
    fn met(&self) -> Option<(usize, String)> {
        let found = self.stops.iter().filter_map(|stop| Some((self.held.find(stop.as_str())?, stop)));
        found.min().map(|(at, stop)| (at, stop.clone()))
    }

    /// Bytes at the end that may begin a stop text.
    fn risky(&self) -> usize {
        let begins = |length: &usize| {
            let cut = self.held.len() - length;
            self.held.is_char_boundary(cut) && self.stops.iter().any(|stop| stop.starts_with(&self.held[cut..]))
        };
        (1..=self.held.len()).rev().find(begins).unwrap_or(0)
    }

    fn finish(&mut self, finish: Finish, mut part: Part) -> Result<Part, Fault> {
        self.over = true;
        if self.stopped.is_none() {
            let rest = self.text.rest();
            self.say(&rest, &mut part);
            part.text += &std::mem::take(&mut self.held);
        }
        let (reason, stop) = match (&self.stopped, finish.reason) {
            (Some(stop), _) => ("stop", json!(stop)),
            (None, FinishReason::Stop) => ("stop", Value::Null),
            (None, FinishReason::Length) => ("length", Value::Null),
            (None, FinishReason::Abort | FinishReason::Error) => return Err(Fault::internal()),
        };
        part.end = Some(End { reason, stop, finish });
        Ok(part)
    }
}
