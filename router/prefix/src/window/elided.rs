//! The messages that stand for those of a conversation which a template need not see.

use minijinja::Value;
use strum::VariantArray as _;

use super::{Before, MARK};
use crate::chat::CallOrder;
use crate::content_format::ContentFormat;
use crate::json_value::object;
use crate::scan::{Asked, Role};
use crate::{ChatBody, PrefixError};

/// Stands for any content but that before a cut.
const ELIDED: &str = "x";
/// Of a call that a tool's answer belongs to; of the length that the strictest family asks for.
const CALL: &str = "abcdef123";

/// A message that stands for others.
#[derive(Clone, Copy)]
pub(super) enum StandIn {
    Plain(Role),
    Call,
    Marked(Role),
}

impl StandIn {
    pub(super) fn json(self) -> String {
        let (role, content) = match self {
            Self::Plain(role) => (role, ELIDED),
            Self::Marked(role) => (role, MARK),
            Self::Call => {
                return format!(
                    r#"{{"role":"assistant","content":"","tool_calls":[{{"id":"{CALL}","type":"function","function":{{"name":"f","arguments":"{{}}"}}}}]}}"#
                );
            }
        };
        let id = if role == Role::Tool { format!(r#""tool_call_id":"{CALL}","#) } else { String::new() };
        format!(r#"{{"role":"{}",{id}"content":"{content}"}}"#, role.as_ref())
    }
}

impl Before {
    /// What stands for all that comes after the leads, the message before the cut last.
    pub(super) fn stand_ins(&self) -> impl Iterator<Item = StandIn> + use<> {
        let user = (self.asked != Asked::Never).then_some(StandIn::Plain(Role::User));
        let answer = (self.asked == Asked::Answered).then_some(StandIn::Plain(Role::Assistant));
        let call = (self.last == Role::Tool).then_some(StandIn::Call);
        [user, answer, call, Some(StandIn::Marked(self.last))].into_iter().flatten()
    }
}

/// All that can stand for a message, as a template is shown it: made once, and shared by all renderings.
#[derive(Debug)]
pub(crate) struct Elided {
    plain: [Value; Role::VARIANTS.len()],
    marked: [Value; Role::VARIANTS.len()],
    /// By the order of their fields.
    calls: [Value; 2],
}

impl Elided {
    /// In the shape that a template wants.
    pub(crate) fn of(format: ContentFormat) -> Result<Self, PrefixError> {
        let shaped = |of: StandIn, order| {
            let body = ChatBody::parse(only(format!(",{}", of.json()).as_bytes()).as_slice())?;
            let mut messages = body.with_call_order(order).more_messages(format)?;
            Ok::<_, PrefixError>(messages.pop().map(object).unwrap_or_default())
        };
        let all = |of: fn(Role) -> StandIn| -> Result<_, PrefixError> {
            let mut values = <[Value; Role::VARIANTS.len()]>::default();
            for role in Role::VARIANTS.iter().copied() {
                values[role as usize] = shaped(of(role), CallOrder::Declared)?;
            }
            Ok(values)
        };
        let mut calls = <[Value; 2]>::default();
        for order in [CallOrder::Declared, CallOrder::NameFirst] {
            calls[order as usize] = shaped(StandIn::Call, order)?;
        }
        Ok(Self { plain: all(StandIn::Plain)?, marked: all(StandIn::Marked)?, calls })
    }

    /// The conversation up to a cut.
    pub(crate) fn messages(&self, before: &Before, order: CallOrder) -> Vec<Value> {
        let leads = before.leads.iter().map(|lead| StandIn::Plain(*lead));
        let value = |of: StandIn| match of {
            StandIn::Plain(role) => &self.plain[role as usize],
            StandIn::Call => &self.calls[order as usize],
            StandIn::Marked(role) => &self.marked[role as usize],
        };
        leads.chain(before.stand_ins()).map(|of| value(of).clone()).collect()
    }
}

/// A body of these messages, each after its comma, and nothing else.
pub(super) fn only(messages: &[u8]) -> Vec<u8> {
    let first = messages.iter().position(|byte| *byte == b',').map_or(messages.len(), |comma| comma + 1);
    [br#"{"messages":["#, &messages[first..], b"]}"].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stands_for_a_message_is_what_its_text_is_shaped_to() {
        for format in [ContentFormat::Text, ContentFormat::Parts] {
            let elided = Elided::of(format).unwrap();
            for order in [CallOrder::Declared, CallOrder::NameFirst] {
                for (asked, last) in
                    [(Asked::Open, Role::Tool), (Asked::Answered, Role::User), (Asked::Never, Role::User)]
                {
                    let before = Before { leads: [Role::System, Role::Developer].into(), asked, last };
                    let leads = before.leads.iter().map(|lead| StandIn::Plain(*lead));
                    let text: Vec<String> = leads.chain(before.stand_ins()).map(StandIn::json).collect();
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
    fn messages_that_follow_others_are_a_list_of_their_own() {
        for (more, body) in [("", ""), (" , {}", " {}"), (",{},{}", "{},{}")] {
            assert_eq!(only(more.as_bytes()), format!(r#"{{"messages":[{body}]}}"#).as_bytes());
        }
    }
}
