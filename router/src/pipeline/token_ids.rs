//! A prompt's token ids for those who need all of them, though its step knew only the newest ones: its request, to be
//! encoded again.

use std::borrow::Cow;
use std::sync::Arc;

use bytes::Bytes;
use prefix::{Asked, ChatForm, ChatLayout, Content, Converted, Identified, Memory, WallTime};
use vocabulary::Chain;

use super::identify::Prefixed;
use crate::catalog::Model;

/// A conversation's request as it was written, and all else that its prompt depends on.
#[derive(Clone, Debug)]
pub struct Written {
    form: ChatForm,
    body: Bytes,
    model: Arc<Model>,
    salt: Option<Box<str>>,
    now: WallTime,
}

impl Written {
    /// This request; one that holds a prompt is written in nobody's words.
    pub fn of(prefixed: &Prefixed) -> Self {
        let request = &prefixed.request;
        Self {
            form: request.endpoint.form().unwrap_or_default(),
            body: request.incoming.body.clone(),
            model: prefixed.model.clone(),
            salt: request.cache_salt().map(Box::from),
            now: prefixed.now,
        }
    }

    /// Its model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Its length.
    pub fn bytes(&self) -> usize {
        self.body.len()
    }

    fn asked(&self) -> Asked<'_> {
        Asked { keys: self.model.keys(self.salt.as_deref()), now: self.now }
    }

    /// Its prompt, computed as a whole: milliseconds for a long one.
    pub fn identify(&self) -> Identified {
        self.model.identifier.conversation(self.form, &self.body, (self.asked(), None))
    }

    /// Has its conversation forgotten.
    pub fn forget(&self, memory: Memory<'_>) {
        let identifier = &self.model.identifier;
        let converted = identifier.converted(self.form, &self.body);
        let layout = match &converted {
            None => ChatLayout::read(&self.body),
            Some(converted) => converted.as_ref().ok().map(Converted::layout),
        };
        if let Some(layout) = layout {
            identifier.forget(layout, self.asked(), memory);
        }
    }
}

/// A prompt's token ids.
#[derive(Clone, Debug)]
pub enum TokenIds {
    /// All of them.
    Here(Vec<u32>),
    /// To be had again.
    Written(Written),
}

impl TokenIds {
    /// Of a step whose token ids can be had. Leaves it without them.
    pub fn take(prefixed: &mut Prefixed) -> Option<Self> {
        match &mut prefixed.prompt.content {
            Content::Tokens(ids) => Some(Self::Here(std::mem::take(ids))),
            Content::Tail(_) => Some(Self::Written(Written::of(prefixed))),
            Content::Bytes(_) => None,
        }
    }

    /// The same, and the step keeps its own.
    pub fn of(prefixed: &Prefixed) -> Option<Self> {
        match &prefixed.prompt.content {
            Content::Tokens(ids) => Some(Self::Here(ids.clone())),
            Content::Tail(_) => Some(Self::Written(Written::of(prefixed))),
            Content::Bytes(_) => None,
        }
    }

    /// Memory that they take.
    pub fn size(&self) -> usize {
        match self {
            Self::Here(ids) => size_of_val(&**ids),
            Self::Written(written) => written.bytes(),
        }
    }

    /// All of them; none where they no longer lead along this chain. May take milliseconds.
    pub fn read(&self, chain: &Chain) -> Option<Cow<'_, [u32]>> {
        match self {
            Self::Here(ids) => Some(Cow::Borrowed(ids)),
            Self::Written(written) => {
                let again = written.identify().prompt;
                let is_same = again.chain.root == chain.root && again.chain.ids == chain.ids;
                match again.content {
                    Content::Tokens(ids) if is_same => Some(Cow::Owned(ids)),
                    _ => None,
                }
            }
        }
    }
}
