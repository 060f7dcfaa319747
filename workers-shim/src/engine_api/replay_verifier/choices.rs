//! Verifies events of `/v1/chat/completions` and `/v1/completions`, choice by choice.

use serde_json::{Map, Value};

use super::buffer::FieldNovelty;
use super::{AnswerPass, EventNovelty, ReplayVerifier};
use crate::engine_api::ClientTokenIdVisibility;
use crate::engine_api::token_transcript::ContinuationBlocker;
use xxhash_rust::xxh3::xxh3_64;

/// Fields that are equal in all events of an answer.
const SHARED_FIELDS: [&str; 3] = ["id", "created", "model"];
/// Fields of a delta that occur once and are not fragments of a text.
const UNIQUE_DELTA_FIELDS: [&str; 4] = ["role", "type", "name", "id"];

/// How many items of a choice's event were known and how many are new.
#[derive(Default)]
struct NoveltyCounts {
    known: usize,
    new: usize,
}

impl NoveltyCounts {
    fn count(&mut self, all: usize, known: usize) {
        self.known += known;
        self.new += all - known;
    }

    fn count_mark(&mut self, mark: FieldNovelty) -> bool {
        self.count(1, usize::from(mark == FieldNovelty::Known));
        mark == FieldNovelty::Known
    }
}

impl ReplayVerifier {
    pub(super) fn choices(&mut self, event: &mut Map<String, Value>) -> Result<EventNovelty, ContinuationBlocker> {
        for name in SHARED_FIELDS {
            if let Some(value) = event.get_mut(name) {
                *value = self.head.entry(name).or_insert_with(|| value.clone()).clone();
            }
        }
        if event.contains_key("prompt_token_ids") {
            let is_known = self.buffer.mark("prompt_token_ids", "")? == FieldNovelty::Known;
            if is_known || self.visible_ids == ClientTokenIdVisibility::None {
                event.insert("prompt_token_ids".into(), Value::Null);
            }
        }
        let Some(Value::Array(choices)) = event.get_mut("choices") else { return Err(ContinuationBlocker::Unreadable) };
        if choices.is_empty() {
            let remainder = self.check_once("usage", "")?;
            self.buffer.check_complete("")?;
            return Ok(remainder);
        }
        let mut new_choices = Vec::new();
        for mut choice in std::mem::take(choices) {
            if self.choice(&mut choice)? == EventNovelty::New {
                new_choices.push(choice);
            }
        }
        let rest = if new_choices.is_empty() { EventNovelty::Known } else { EventNovelty::New };
        *choices = new_choices;
        Ok(rest)
    }

    pub(super) fn check_once(&mut self, path: &str, what: &str) -> Result<EventNovelty, ContinuationBlocker> {
        let mark = self.buffer.mark(path, what)?;
        Ok(if mark == FieldNovelty::Known { EventNovelty::Known } else { EventNovelty::New })
    }

    fn choice(&mut self, choice: &mut Value) -> Result<EventNovelty, ContinuationBlocker> {
        let at = choice["index"].as_u64().unwrap_or(0);
        let Value::Object(fields) = choice else { return Ok(EventNovelty::New) };
        let (finish, all) = (format!("{at}/finish"), format!("{at}/"));
        let was_over = self.phase == AnswerPass::Replay && self.buffer.is_marked(&finish);
        let mut sorted = NoveltyCounts::default();
        self.ids_of(at, fields, &mut sorted)?;
        for name in ["text", "delta"] {
            let path = format!("{at}/{name}");
            if let Some(value) = fields.get_mut(name) {
                self.value(&path, value, &mut sorted)?;
            }
        }
        if let Some(Value::Object(logprobs)) = fields.get_mut("logprobs") {
            self.logprobs(&format!("{at}/logprobs"), logprobs, &mut sorted)?;
        }
        if was_over && sorted.new > 0 {
            return Err(ContinuationBlocker::Diverged);
        }
        if let Some(Value::String(reason)) = fields.get("finish_reason") {
            sorted.count_mark(self.buffer.mark(&finish, reason)?);
            self.buffer.check_complete(&all)?;
        }
        let is_old = sorted.known > 0 || self.buffer.check_fields_complete(&all).is_err();
        Ok(if sorted.new == 0 && is_old { EventNovelty::Known } else { EventNovelty::New })
    }

    /// Removes the known token ids of a choice.
    fn ids_of(
        &mut self,
        at: u64,
        fields: &mut Map<String, Value>,
        counts: &mut NoveltyCounts,
    ) -> Result<(), ContinuationBlocker> {
        for name in ["prompt_token_ids", "token_ids"] {
            let Some(Value::Array(ids)) = fields.get_mut(name) else { continue };
            if self.visible_ids == ClientTokenIdVisibility::None {
                fields.insert(name.into(), Value::Null);
                continue;
            }
            let numbers: Vec<u64> = ids.iter().filter_map(Value::as_u64).collect();
            let known = self.buffer.list(&format!("{at}/{name}"), &numbers)?;
            ids.drain(..known.min(ids.len()));
            counts.count(numbers.len(), known);
        }
        Ok(())
    }

    /// Removes the known parts of all texts in a delta, or in a part of one.
    fn value(&mut self, path: &str, value: &mut Value, counts: &mut NoveltyCounts) -> Result<(), ContinuationBlocker> {
        match value {
            Value::String(text) => {
                let new = self.buffer.text(path, text)?.to_owned();
                counts.count(text.len(), text.len() - new.len());
                *text = new;
            }
            Value::Object(fields) => {
                let mut known = Vec::new();
                for (name, value) in fields.iter_mut() {
                    let path = format!("{path}/{name}");
                    match value.as_str().filter(|_| UNIQUE_DELTA_FIELDS.contains(&name.as_str())) {
                        // Every engine generates its own ids, so their values are not compared.
                        Some(text) if !text.is_empty() => {
                            if name == "name" {
                                self.buffer.mark_output();
                            }
                            let mark = self.buffer.mark(&path, if name == "id" { "" } else { text })?;
                            if counts.count_mark(mark) {
                                known.push(name.clone());
                            }
                        }
                        _ => self.value(&path, value, counts)?,
                    }
                }
                fields.retain(|name, _| !known.contains(name));
            }
            Value::Array(items) => {
                for (position, item) in (0..).zip(items) {
                    let at = item["index"].as_u64().unwrap_or(position);
                    self.value(&format!("{path}/{at}"), item, counts)?;
                }
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
        Ok(())
    }

    /// Removes the known log probabilities: a chat's list of tokens, or a completion's lists of equal length. Their
    /// numbers differ between engines and are not compared.
    fn logprobs(
        &mut self,
        path: &str,
        lists: &mut Map<String, Value>,
        counts: &mut NoveltyCounts,
    ) -> Result<(), ContinuationBlocker> {
        if let Some(Value::Array(tokens)) = lists.get("tokens") {
            let tokens: Vec<u64> = tokens.iter().map(hashed).collect();
            let known = self.buffer.list(path, &tokens)?;
            counts.count(tokens.len(), known);
            let same = |list: &&mut Vec<Value>| list.len() == tokens.len();
            lists.values_mut().filter_map(Value::as_array_mut).filter(same).for_each(|list| drop(list.drain(..known)));
            return Ok(());
        }
        for (name, list) in lists.iter_mut() {
            let Value::Array(items) = list else { continue };
            let known = self.tokens(&format!("{path}/{name}"), items)?;
            counts.count(items.len() + known, known);
        }
        Ok(())
    }

    /// Removes the known tokens from a list with log probabilities, and returns how many they were.
    pub(super) fn tokens(&mut self, path: &str, items: &mut Vec<Value>) -> Result<usize, ContinuationBlocker> {
        let tokens: Vec<u64> = items.iter().map(|item| hashed(&item["token"])).collect();
        let known = self.buffer.list(path, &tokens)?;
        items.drain(..known);
        Ok(known)
    }
}

fn hashed(token: &Value) -> u64 {
    xxh3_64(token.as_str().unwrap_or_default().as_bytes())
}
