//! Verifies events of `/v1/messages` and `/v1/responses`, which have names.

use std::collections::HashMap;

use serde_json::{Map, Value};

use super::{AnswerPass, EventNovelty, ReplayVerifier};
use crate::engine_api::token_transcript::ContinuationBlocker;

/// Fields that contain ids of parts of an answer.
const IDS: [&str; 4] = ["id", "item_id", "call_id", "response_id"];
/// Maximum number of ids renamed in a repeated answer; far more than any engine uses.
const MAX_RENAMED: usize = 4096;

fn text<'v>(value: &'v Value, name: &str) -> &'v str {
    value[name].as_str().unwrap_or_default()
}

fn kind_of(event: &Map<String, Value>) -> String {
    event.get("type").and_then(Value::as_str).unwrap_or_default().to_owned()
}

fn number(event: &Map<String, Value>, name: &str) -> u64 {
    event.get(name).and_then(Value::as_u64).unwrap_or(0)
}

impl ReplayVerifier {
    /// Verifies an event of `/v1/messages`.
    pub(super) fn message(&mut self, event: &mut Map<String, Value>) -> Result<EventNovelty, ContinuationBlocker> {
        let (kind, at) = (kind_of(event), number(event, "index"));
        match kind.as_str() {
            "message_start" => self.check_once(&kind, ""),
            "content_block_start" => {
                let block = event.get("content_block").unwrap_or(&Value::Null);
                let what = format!("{}/{}", text(block, "type"), text(block, "name"));
                if !text(block, "name").is_empty() {
                    self.buffer.mark_output();
                }
                self.check_once(&format!("{at}/start"), &what)
            }
            "content_block_delta" => match event.get_mut("delta") {
                Some(Value::Object(delta)) => self.block(at, delta),
                _ => Err(ContinuationBlocker::Unreadable),
            },
            "content_block_stop" => {
                self.buffer.check_fields_complete(&format!("{at}/"))?;
                self.check_once(&format!("{at}/stop"), "")
            }
            "message_delta" | "message_stop" => {
                let remainder = self.check_once(&kind, "")?;
                self.buffer.check_complete("")?;
                Ok(remainder)
            }
            "ping" => Ok(EventNovelty::New),
            _ => Err(ContinuationBlocker::Unreadable),
        }
    }

    /// Removes the known parts of a content block's delta.
    fn block(&mut self, at: u64, delta: &mut Map<String, Value>) -> Result<EventNovelty, ContinuationBlocker> {
        let was_over = self.phase == AnswerPass::Replay && self.buffer.is_marked(&format!("{at}/stop"));
        let mut remainder = EventNovelty::Known;
        for (name, value) in delta.iter_mut().filter(|(name, _)| *name != "type") {
            let path = format!("{at}/{name}");
            match value {
                // Every engine generates its own signature, so its value is not compared.
                Value::String(_) if name == "signature" => remainder = self.check_once(&path, "")?,
                Value::String(text) => {
                    let new = self.buffer.text(&path, text)?.to_owned();
                    if !new.is_empty() {
                        remainder = EventNovelty::New;
                    }
                    *text = new;
                }
                _ => return Err(ContinuationBlocker::Unreadable),
            }
        }
        if was_over && remainder == EventNovelty::New { Err(ContinuationBlocker::Diverged) } else { Ok(remainder) }
    }

    /// Verifies an event of `/v1/responses`.
    pub(super) fn response(&mut self, event: &mut Map<String, Value>) -> Result<EventNovelty, ContinuationBlocker> {
        if self.phase == AnswerPass::First {
            self.next_number = number(event, "sequence_number") + 1;
        }
        let kind = kind_of(event);
        if let Some(response) = event.get_mut("response") {
            self.map_id("response", text(response, "id"))?;
            if let Some(created) = response.get_mut("created_at") {
                *created = self.head.entry("created_at").or_insert_with(|| created.clone()).clone();
            }
        }
        let (item, part) = (number(event, "output_index"), part_of(event));
        let path = format!("{item}/{part}/{kind}");
        let remainder = match kind.as_str() {
            "response.completed" | "response.incomplete" => {
                let remainder = self.check_once("last", "")?;
                self.buffer.check_complete("").map(|()| remainder)
            }
            "response.output_item.added" | "response.output_item.done" => self.item((item, &kind), event),
            _ if kind.ends_with(".delta") => {
                let was_over = self.is_part_finished(item, part, &path);
                match self.delta(&path, event) {
                    Ok(EventNovelty::New) if was_over => Err(ContinuationBlocker::Diverged),
                    remainder => remainder,
                }
            }
            _ => {
                if kind.ends_with(".done") {
                    self.buffer.check_fields_complete(&format!("{item}/{part}/"))?;
                }
                self.check_once(if event.contains_key("output_index") { &path } else { &kind }, "")
            }
        };
        if !self.renamed_ids.is_empty() {
            rename(event, &self.renamed_ids);
        }
        remainder
    }

    /// Returns whether the client has the end of the part, or of its item.
    fn is_part_finished(&self, item: u64, part: u64, delta: &str) -> bool {
        self.phase == AnswerPass::Replay
            && [
                format!("{}.done", delta.trim_end_matches(".delta")),
                format!("{item}/{part}/response.content_part.done"),
                format!("{item}/response.output_item.done"),
            ]
            .iter()
            .any(|end| self.buffer.is_marked(end))
    }

    fn item(
        &mut self,
        (at, kind): (u64, &str),
        event: &Map<String, Value>,
    ) -> Result<EventNovelty, ContinuationBlocker> {
        let item = event.get("item").unwrap_or(&Value::Null);
        if kind.ends_with(".done") {
            self.buffer.check_fields_complete(&format!("{at}/"))?;
        }
        if !text(item, "name").is_empty() {
            self.buffer.mark_output();
        }
        for name in ["id", "call_id"] {
            self.map_id(&format!("{at}/{name}"), text(item, name))?;
        }
        self.check_once(&format!("{at}/{kind}"), &format!("{}/{}", text(item, "type"), text(item, "name")))
    }

    fn delta(&mut self, path: &str, event: &mut Map<String, Value>) -> Result<EventNovelty, ContinuationBlocker> {
        let logprobs = match event.get_mut("logprobs") {
            Some(Value::Array(items)) => {
                self.tokens(&format!("{path}/logprobs"), items)?;
                items.len()
            }
            _ => 0,
        };
        let Some(Value::String(text)) = event.get_mut("delta") else { return Err(ContinuationBlocker::Unreadable) };
        let new = self.buffer.text(path, text)?.to_owned();
        let is_nothing = new.is_empty() && logprobs == 0;
        *text = new;
        Ok(if is_nothing { EventNovelty::Known } else { EventNovelty::New })
    }

    /// Maps the current engine's `id` to the id that the first engine's answer has at `path`.
    fn map_id(&mut self, path: &str, id: &str) -> Result<(), ContinuationBlocker> {
        if id.is_empty() {
            return Ok(());
        }
        if !self.ids.contains_key(path) {
            if self.buffer.is_full() {
                return Ok(());
            }
            self.buffer.reserve_space(path);
            self.buffer.reserve_space(id);
        }
        let first = self.ids.entry(path.to_owned()).or_insert_with(|| id.to_owned());
        if first != id && !self.renamed_ids.contains_key(id) {
            if self.renamed_ids.len() == MAX_RENAMED {
                return Err(ContinuationBlocker::Diverged);
            }
            self.renamed_ids.insert(id.to_owned(), first.clone());
        }
        Ok(())
    }
}

/// Returns the index of the item's part that an event belongs to.
fn part_of(event: &Map<String, Value>) -> u64 {
    let name = if event.contains_key("summary_index") { "summary_index" } else { "content_index" };
    number(event, name)
}

fn rename(fields: &mut Map<String, Value>, names: &HashMap<String, String>) {
    for (name, value) in fields.iter_mut() {
        match value {
            Value::String(id) if IDS.contains(&name.as_str()) => {
                if let Some(first) = names.get(id.as_str()) {
                    first.clone_into(id);
                }
            }
            Value::Object(inner) => rename(inner, names),
            Value::Array(items) => {
                items.iter_mut().filter_map(Value::as_object_mut).for_each(|inner| rename(inner, names));
            }
            _ => {}
        }
    }
}
