//! One choice of an answer: decodes tokens, and detects stop strings and the end.

use std::sync::Arc;

use engine_model::{FinishReason, FinishedRequest};
use serde_json::{Value, json};

use crate::sim::codec::TextCodec;
use crate::sim::detokenizer::Detokenizer;
use crate::sim::driver::{RequestHandle, RequestUpdate};

use super::errors::ErrorResponse;

/// A fragment of an answer.
#[derive(Default)]
pub(crate) struct AnswerDelta {
    pub(crate) text: String,
    pub(crate) ids: Vec<u32>,
    pub(crate) end: Option<ChoiceEnd>,
}

pub(crate) struct ChoiceEnd {
    pub(crate) reason: &'static str,
    /// The stop string, if one ended the answer.
    pub(crate) stop: Value,
    pub(crate) finish: FinishedRequest,
}

/// A choice that is being generated.
pub(crate) struct ChoiceStream {
    request: RequestHandle,
    text: Detokenizer,
    stops: Vec<String>,
    /// Text that may be the beginning of a stop string.
    withheld: String,
    /// The matched stop string; the engine has already been stopped.
    matched_stop: Option<String>,
    is_finished: bool,
}

impl ChoiceStream {
    pub(crate) fn new(request: RequestHandle, codec: Arc<dyn TextCodec>, stops: Vec<String>) -> Self {
        let text = Detokenizer::new(codec);
        Self { request, text, stops, withheld: String::new(), matched_stop: None, is_finished: false }
    }

    /// Returns the output since the last call; None after the end.
    pub(crate) async fn next(&mut self) -> Option<Result<AnswerDelta, ErrorResponse>> {
        if self.is_finished {
            return None;
        }
        let updates = self.request.updates().await;
        let mut part = AnswerDelta::default();
        if updates.is_empty() {
            self.is_finished = true;
            return Some(Err(ErrorResponse::internal()));
        }
        for update in updates {
            match update {
                RequestUpdate::Token(id) => self.push_token(id, &mut part),
                RequestUpdate::Finished(finish) => return Some(self.finish(finish, part)),
            }
        }
        Some(Ok(part))
    }

    /// Collects all output until the end.
    pub(crate) async fn collect(mut self) -> Result<(AnswerDelta, ChoiceEnd), ErrorResponse> {
        let mut all = AnswerDelta::default();
        while let Some(part) = self.next().await {
            let part = part?;
            all.text += &part.text;
            all.ids.extend(part.ids);
            if let Some(end) = part.end {
                return Ok((all, end));
            }
        }
        Err(ErrorResponse::internal())
    }

    fn push_token(&mut self, id: u32, part: &mut AnswerDelta) {
        if self.matched_stop.is_some() {
            return;
        }
        part.ids.push(id);
        let text = self.text.push(id);
        self.push_text(&text, part);
    }

    fn push_text(&mut self, said: &str, part: &mut AnswerDelta) {
        self.withheld += said;
        if let Some((at, stop)) = self.find_stop() {
            self.withheld.truncate(at);
            self.matched_stop = Some(stop);
            self.request.stop();
        }
        let safe = if self.matched_stop.is_some() {
            self.withheld.len()
        } else {
            self.withheld.len() - self.possible_stop_suffix()
        };
        part.text.extend(self.withheld.drain(..safe));
    }

    /// Returns the first stop string in the withheld text, with its position.
    fn find_stop(&self) -> Option<(usize, String)> {
        let found = self.stops.iter().filter_map(|stop| Some((self.withheld.find(stop.as_str())?, stop)));
        found.min().map(|(at, stop)| (at, stop.clone()))
    }

    /// Returns the number of bytes at the end that may begin a stop string.
    fn possible_stop_suffix(&self) -> usize {
        let begins = |length: &usize| {
            let cut = self.withheld.len() - length;
            self.withheld.is_char_boundary(cut) && self.stops.iter().any(|stop| stop.starts_with(&self.withheld[cut..]))
        };
        (1..=self.withheld.len()).rev().find(begins).unwrap_or(0)
    }

    fn finish(&mut self, finish: FinishedRequest, mut part: AnswerDelta) -> Result<AnswerDelta, ErrorResponse> {
        self.is_finished = true;
        if self.matched_stop.is_none() {
            let rest = self.text.finish();
            self.push_text(&rest, &mut part);
            part.text += &std::mem::take(&mut self.withheld);
        }
        let (reason, stop) = match (&self.matched_stop, finish.reason) {
            (Some(stop), _) => ("stop", json!(stop)),
            (None, FinishReason::Stop) => ("stop", Value::Null),
            (None, FinishReason::Length) => ("length", Value::Null),
            (None, FinishReason::Abort | FinishReason::Error) => return Err(ErrorResponse::internal()),
        };
        part.end = Some(ChoiceEnd { reason, stop, finish });
        Ok(part)
    }
}
