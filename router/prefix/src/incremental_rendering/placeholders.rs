//! Placeholder messages for those that a template need not see.

use minijinja::Value;
use strum::VariantArray as _;

use super::{HistorySummary, SENTINEL};
use crate::chat::CallFieldOrder;
use crate::content_format::ContentFormat;
use crate::message_scan::{MessageRole, QuestionState};
use crate::template_value::object;
use crate::{ChatBody, PrefixError};

/// Content of every placeholder except the one before the cut.
const PLACEHOLDER_TEXT: &str = "x";
/// Call id of placeholder tool calls and results; nine characters, as the strictest model family requires.
const PLACEHOLDER_CALL_ID: &str = "abcdef123";

/// A message that replaces others.
#[derive(Clone, Copy)]
pub(super) enum PlaceholderMessage {
    Plain(MessageRole),
    Call,
    Marked(MessageRole),
}

impl PlaceholderMessage {
    pub(super) fn json(self) -> String {
        let (role, content) = match self {
            Self::Plain(role) => (role, PLACEHOLDER_TEXT),
            Self::Marked(role) => (role, SENTINEL),
            Self::Call => {
                return format!(
                    r#"{{"role":"assistant","content":"","tool_calls":[{{"id":"{PLACEHOLDER_CALL_ID}","type":"function","function":{{"name":"f","arguments":"{{}}"}}}}]}}"#
                );
            }
        };
        let id = if role == MessageRole::Tool {
            format!(r#""tool_call_id":"{PLACEHOLDER_CALL_ID}","#)
        } else {
            String::new()
        };
        format!(r#"{{"role":"{}",{id}"content":"{content}"}}"#, role.as_ref())
    }
}

impl HistorySummary {
    /// Returns the placeholders for all messages after the leading ones; the message before the cut is last.
    pub(super) fn placeholders(&self) -> impl Iterator<Item = PlaceholderMessage> + use<> {
        let user = (self.question != QuestionState::Never).then_some(PlaceholderMessage::Plain(MessageRole::User));
        let answer =
            (self.question == QuestionState::Answered).then_some(PlaceholderMessage::Plain(MessageRole::Assistant));
        let call = (self.last_role == MessageRole::Tool).then_some(PlaceholderMessage::Call);
        [user, answer, call, Some(PlaceholderMessage::Marked(self.last_role))].into_iter().flatten()
    }
}

/// All placeholders as template values, built once and shared by all renderings.
#[derive(Debug)]
pub(crate) struct PlaceholderMessages {
    plain: [Value; MessageRole::VARIANTS.len()],
    marked: [Value; MessageRole::VARIANTS.len()],
    /// Indexed by `CallFieldOrder`.
    calls: [Value; 2],
}

impl PlaceholderMessages {
    /// Builds the placeholders in the content format of the template.
    pub(crate) fn of(format: ContentFormat) -> Result<Self, PrefixError> {
        let shaped = |of: PlaceholderMessage, order| {
            let body = ChatBody::parse(messages_body(format!(",{}", of.json()).as_bytes()).as_slice())?;
            let mut messages = body.with_call_order(order).appended_messages(format)?;
            Ok::<_, PrefixError>(messages.pop().map(object).unwrap_or_default())
        };
        let all = |of: fn(MessageRole) -> PlaceholderMessage| -> Result<_, PrefixError> {
            let mut values = <[Value; MessageRole::VARIANTS.len()]>::default();
            for role in MessageRole::VARIANTS.iter().copied() {
                values[role as usize] = shaped(of(role), CallFieldOrder::Declared)?;
            }
            Ok(values)
        };
        let mut calls = <[Value; 2]>::default();
        for order in [CallFieldOrder::Declared, CallFieldOrder::NameFirst] {
            calls[order as usize] = shaped(PlaceholderMessage::Call, order)?;
        }
        Ok(Self { plain: all(PlaceholderMessage::Plain)?, marked: all(PlaceholderMessage::Marked)?, calls })
    }

    /// Returns the conversation up to a cut.
    pub(crate) fn messages(&self, before: &HistorySummary, order: CallFieldOrder) -> Vec<Value> {
        let leads = before.leading_roles.iter().map(|lead| PlaceholderMessage::Plain(*lead));
        let value = |of: PlaceholderMessage| match of {
            PlaceholderMessage::Plain(role) => &self.plain[role as usize],
            PlaceholderMessage::Call => &self.calls[order as usize],
            PlaceholderMessage::Marked(role) => &self.marked[role as usize],
        };
        leads.chain(before.placeholders()).map(|of| value(of).clone()).collect()
    }
}

/// Returns a body with only these messages, each preceded by a comma.
pub(super) fn messages_body(messages: &[u8]) -> Vec<u8> {
    let first = messages.iter().position(|byte| *byte == b',').map_or(messages.len(), |comma| comma + 1);
    [br#"{"messages":["#, &messages[first..], b"]}"].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placeholder_messages_render_like_parsed_messages() {
        for format in [ContentFormat::Text, ContentFormat::Parts] {
            let elided = PlaceholderMessages::of(format).unwrap();
            for order in [CallFieldOrder::Declared, CallFieldOrder::NameFirst] {
                for (asked, last) in [
                    (QuestionState::Open, MessageRole::Tool),
                    (QuestionState::Answered, MessageRole::User),
                    (QuestionState::Never, MessageRole::User),
                ] {
                    let before = HistorySummary {
                        leading_roles: [MessageRole::System, MessageRole::Developer].into(),
                        question: asked,
                        last_role: last,
                    };
                    let leads = before.leading_roles.iter().map(|lead| PlaceholderMessage::Plain(*lead));
                    let text: Vec<String> = leads.chain(before.placeholders()).map(PlaceholderMessage::json).collect();
                    let body = format!(r#"{{"messages":[{}]}}"#, text.join(","));
                    let chat = ChatBody::parse(body.as_bytes()).unwrap().with_call_order(order);
                    let whole: Vec<Value> = chat.messages(format).unwrap().into_iter().map(object).collect();
                    let shown = elided.messages(&before, order);
                    assert_eq!(format!("{shown:?}"), format!("{whole:?}"), "{before:?}");
                }
            }
        }
    }

    #[test]
    fn appended_messages_form_a_body_of_their_own() {
        for (more, body) in [("", ""), (" , {}", " {}"), (",{},{}", "{},{}")] {
            assert_eq!(messages_body(more.as_bytes()), format!(r#"{{"messages":[{body}]}}"#).as_bytes());
        }
    }
}
