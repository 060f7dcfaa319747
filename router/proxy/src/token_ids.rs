//! Token ids of whole prompts, for uses that need all of them although the step knew only the newest ones: the request
//! is kept so that it can be encoded again.

use std::borrow::Cow;
use std::sync::Arc;

use bytes::Bytes;
use prefix::{
    ChatBodyLayout, ChatEndpoint, ConversationQuery, ConvertedRequest, ExtraPromptInputs, PromptContent,
    ResolvedPrompt, WallTime,
};
use vocabulary::PrefixChain;

use crate::catalog::Model;
use crate::identified_request::IdentifiedRequest;

/// A conversation's request as received, and everything else that its prompt depends on.
#[derive(Clone, Debug)]
pub struct EncodableRequest {
    form: ChatEndpoint,
    body: Bytes,
    model: Arc<Model>,
    salt: Option<Box<str>>,
    wall_time: WallTime,
}

impl EncodableRequest {
    /// Captures this request. One that holds a prompt belongs to no chat endpoint, so the default format is stored.
    pub fn of(identified: &IdentifiedRequest) -> Self {
        let request = &identified.request;
        Self {
            form: request.endpoint.chat_form().unwrap_or_default(),
            body: request.incoming.body.clone(),
            model: identified.model.clone(),
            salt: request.cache_salt().map(Box::from),
            wall_time: identified.wall_time,
        }
    }

    /// Returns its model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Returns the length of its body.
    pub fn bytes(&self) -> usize {
        self.body.len()
    }

    fn prompt_options(&self) -> ExtraPromptInputs<'_> {
        ExtraPromptInputs { keys: self.model.root_keys(self.salt.as_deref()), now: self.wall_time }
    }

    /// Computes its whole prompt: milliseconds for a long one.
    pub fn identify(&self) -> ResolvedPrompt {
        self.model.identifier.resolve_conversation(self.form, &self.body, (self.prompt_options(), None))
    }

    /// Removes its conversation from the cache.
    pub fn forget(&self, lookup: ConversationQuery<'_>) {
        let identifier = &self.model.identifier;
        let converted = identifier.convert(self.form, &self.body);
        let layout = match &converted {
            None => ChatBodyLayout::read(&self.body),
            Some(converted) => converted.as_ref().ok().map(ConvertedRequest::layout),
        };
        if let Some(layout) = layout {
            identifier.forget(layout, self.prompt_options(), lookup);
        }
    }
}

/// A prompt's token ids, or the request from which they are encoded again when they are needed.
#[derive(Clone, Debug)]
pub enum LazyTokenIds {
    /// All token ids.
    Known(Vec<u32>),
    /// The request, from which they can be encoded again.
    Encodable(EncodableRequest),
}

impl LazyTokenIds {
    /// Takes the token ids out of a step, where they are available.
    pub fn take(identified: &mut IdentifiedRequest) -> Option<Self> {
        match &mut identified.prompt.content {
            PromptContent::Tokens(ids) => Some(Self::Known(std::mem::take(ids))),
            PromptContent::Tail(_) => Some(Self::Encodable(EncodableRequest::of(identified))),
            PromptContent::Unknown => None,
        }
    }

    /// Copies the token ids of a step, where they are available.
    pub fn of(identified: &IdentifiedRequest) -> Option<Self> {
        match &identified.prompt.content {
            PromptContent::Tokens(ids) => Some(Self::Known(ids.clone())),
            PromptContent::Tail(_) => Some(Self::Encodable(EncodableRequest::of(identified))),
            PromptContent::Unknown => None,
        }
    }

    /// Bytes of memory that they take.
    pub fn size(&self) -> usize {
        match self {
            Self::Known(ids) => size_of_val(&**ids),
            Self::Encodable(written) => written.bytes(),
        }
    }

    /// Returns all token ids; `None` where they no longer produce this chain. May take milliseconds.
    pub fn read(&self, chain: &PrefixChain) -> Option<Cow<'_, [u32]>> {
        match self {
            Self::Known(ids) => Some(Cow::Borrowed(ids)),
            Self::Encodable(written) => {
                let again = written.identify().prompt;
                let is_same = again.chain.root == chain.root && again.chain.ids == chain.ids;
                match again.content {
                    PromptContent::Tokens(ids) if is_same => Some(Cow::Owned(ids)),
                    _ => None,
                }
            }
        }
    }
}
