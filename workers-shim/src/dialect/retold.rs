//! An answer that another engine makes again from its beginning: what the client has of it is compared with that and left
//! out, and the rest comes in the first engine's names and numbers.
//!
//! Compared are texts and lists of tokens, place by place and not event by event: engines cut one answer into events as
//! their load has it. It must never deliver what follows on something else than the client has.

mod choices;
mod named;
mod tape;

use std::collections::{BTreeMap, HashMap};

use serde_json::{Map, Value};

use super::request::Api;
use super::said::{Lost, Passage, ShownIds};
use tape::Tape;

/// How alike the answers to one request are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Repeats {
    /// It is greedy or has a seed.
    Always,
    /// It is drawn: only what comes before its first word is the same.
    UntilItSpeaks,
}

/// Whose events come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Turn {
    First,
    Again,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Left {
    Something,
    Nothing,
}

/// One answer as far as the client has it.
#[derive(Debug)]
pub struct Retold {
    api: Api,
    shown: ShownIds,
    repeats: Repeats,
    turn: Turn,
    tape: Tape,
    /// Fields that all events share, as the first engine wrote them.
    head: Map<String, Value>,
    /// The first engine's ids by place, and those of the one that tells now that stand for them.
    ids: BTreeMap<String, String>,
    renamed: HashMap<String, String>,
    /// The number of the next event, where events have one.
    number: u64,
    lost: Option<Lost>,
}

impl Retold {
    /// Nothing yet. Ids that are not shown were asked for here.
    pub fn new(api: Api, shown: ShownIds, repeats: Repeats) -> Self {
        Self {
            api,
            shown,
            repeats,
            turn: Turn::First,
            tape: Tape::default(),
            head: Map::new(),
            ids: BTreeMap::new(),
            renamed: HashMap::new(),
            number: 0,
            lost: None,
        }
    }

    /// Whether it can be made again.
    pub(super) fn repeatable(&self) -> Result<(), Lost> {
        if let Some(lost) = self.lost {
            Err(lost)
        } else if self.tape.is_full() {
            Err(Lost::TooLong)
        } else if self.repeats == Repeats::UntilItSpeaks && self.tape.speaks() {
            Err(Lost::Drawn)
        } else {
            Ok(())
        }
    }

    /// What comes next is another engine's answer to the same request.
    pub(super) fn go_on(&mut self) {
        self.tape.rewind();
        self.renamed.clear();
        if !self.tape.is_empty() {
            self.turn = Turn::Again;
        }
    }

    /// Whether what comes was told before, or may have been.
    pub(super) fn is_again(&self) -> bool {
        self.turn == Turn::Again
    }

    /// Events are lost that nobody could read.
    pub(super) fn unread(&mut self) {
        self.lose(if self.turn == Turn::First { Lost::TooLong } else { Lost::Differs });
    }

    /// The stream is over. What the client has must have come again.
    pub(super) fn over(&mut self) -> Result<(), Lost> {
        if self.turn == Turn::Again && self.lost.is_some() {
            return Err(Lost::Differs);
        }
        self.tape.complete("").inspect_err(|lost| self.lose(*lost))
    }

    /// Notes what an event tells, and says what becomes of it.
    pub(super) fn take(&mut self, payload: &[u8]) -> Passage {
        if self.lost.is_some() {
            return if self.turn == Turn::First { Passage::Same } else { Passage::Hidden };
        }
        let Ok(Value::Object(mut event)) = serde_json::from_slice(payload) else {
            self.unread();
            return if self.turn == Turn::First { Passage::Same } else { Passage::Hidden };
        };
        let left = match self.api {
            Api::Chat | Api::Completions => self.choices(&mut event),
            Api::Messages => self.message(&mut event),
            Api::Responses => self.response(&mut event),
        };
        match (self.turn, left) {
            (Turn::First, left) => {
                self.noted(left.map(drop));
                Passage::Same
            }
            (Turn::Again, Ok(Left::Something)) => Passage::As(self.written(event)),
            (Turn::Again, Ok(Left::Nothing)) => Passage::Hidden,
            (Turn::Again, Err(_)) => {
                self.lose(Lost::Differs);
                Passage::Hidden
            }
        }
    }

    /// Whether what the first engine has told so far is to be kept.
    fn noted(&mut self, understood: Result<(), Lost>) {
        if understood.is_err() {
            self.lose(Lost::Strange);
        } else if let Err(lost) = self.repeatable() {
            self.lose(lost);
        }
    }

    /// Nothing is compared any more.
    fn lose(&mut self, lost: Lost) {
        self.lost = self.lost.or(Some(lost));
        self.tape = Tape::default();
    }

    fn written(&mut self, mut event: Map<String, Value>) -> Vec<u8> {
        if let Some(number) = event.get_mut("sequence_number") {
            *number = self.number.into();
            self.number += 1;
        }
        let name = match (self.api, event.get("type").and_then(Value::as_str)) {
            (Api::Messages | Api::Responses, Some(kind)) => format!("event: {kind}\n"),
            _ => String::new(),
        };
        format!("{name}data: {}\n\n", Value::Object(event)).into_bytes()
    }
}

#[cfg(test)]
mod tests;
