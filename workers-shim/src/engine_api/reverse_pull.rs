//! What a target hands back with its answer, and that answer as its client may see it.
//!
//! No client ever sees parameters of a transfer: they name hosts and blocks.

use std::borrow::Cow;

use bytes::Bytes;
use serde::Deserialize;
use serde_json::value::RawValue;
use vocabulary::Tokens;

use super::splice::{JsonFields, JsonSplice};
use super::token_transcript::TokenIdVisibility;

/// Parameters of one decode leg, for exactly one prefill leg of the session's next step, whose prompt must begin with the
/// same tokens. It cannot be copied, and is used up where it is sent. Debug does not show them.
#[derive(PartialEq, Eq)]
pub struct ReversePullParams {
    parameters: Bytes,
    tokens: Tokens,
}

impl std::fmt::Debug for ReversePullParams {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Readback").field("tokens", &self.tokens).finish_non_exhaustive()
    }
}

impl ReversePullParams {
    /// Leading tokens of prompt and answer whose KV can be fetched.
    pub fn tokens(&self) -> Tokens {
        self.tokens
    }

    /// The object as the engine wrote it.
    pub(super) fn into_parameters(self) -> Bytes {
        self.parameters
    }

    /// None unless the engine keeps blocks, and says all that a fetcher needs: parameters that lack some hang it.
    pub(super) fn of(raw: &RawValue) -> Option<Self> {
        let named: ReversePullFields<'_> = serde_json::from_str(raw.get()).ok()?;
        let texts = [&named.remote_request_id, &named.remote_engine_id, &named.remote_host];
        let is_named = texts.iter().all(|text| text.as_ref().is_some_and(|text| !text.is_empty()));
        let keeps = named.remote_block_ids.iter().flatten().any(|group| !group.is_empty());
        let is_whole = named.do_remote_decode == Some(true)
            && named.do_remote_prefill == Some(false)
            && is_named
            && keeps
            && named.remote_port.is_some();
        let tokens = named.remote_num_tokens.filter(|tokens| is_whole && *tokens > 0)?;
        // A copy: the rest of the answer is not kept with it.
        Some(Self { parameters: Bytes::copy_from_slice(raw.get().as_bytes()), tokens: Tokens(tokens) })
    }
}

#[derive(Deserialize)]
struct ReversePullFields<'a> {
    do_remote_prefill: Option<bool>,
    do_remote_decode: Option<bool>,
    #[serde(borrow)]
    remote_request_id: Option<Cow<'a, str>>,
    remote_engine_id: Option<Cow<'a, str>>,
    remote_host: Option<Cow<'a, str>>,
    remote_port: Option<u16>,
    remote_block_ids: Option<Vec<Vec<u64>>>,
    remote_num_tokens: Option<u64>,
}

/// The token ids of prompt and answer as the engine tells them, where it does and there is one choice.
pub fn answer_token_ids(answer: &[u8]) -> Option<Vec<u32>> {
    #[derive(Deserialize)]
    struct AnswerTokenIds {
        prompt_token_ids: Option<Vec<u32>>,
        #[serde(default)]
        choices: Vec<ChoiceTokenIds>,
    }
    #[derive(Deserialize)]
    struct ChoiceTokenIds {
        prompt_token_ids: Option<Vec<u32>>,
        token_ids: Option<Vec<u32>>,
    }
    let mut told: AnswerTokenIds = serde_json::from_slice(answer).ok()?;
    let choice = told.choices.pop().filter(|_| told.choices.is_empty())?;
    let mut ids = told.prompt_token_ids.or(choice.prompt_token_ids)?;
    ids.extend(choice.token_ids?);
    Some(ids)
}

/// A whole answer without what its client may not see.
pub fn redact_answer(answer: &Bytes, ids: TokenIdVisibility) -> Bytes {
    let Ok(fields) = JsonFields::scan(answer.clone(), &[]) else { return answer.clone() };
    let mut splice = JsonSplice::new(&fields);
    let hide = |splice: &mut JsonSplice<'_>, name| {
        if fields.has(name) {
            splice.set(name, b"null".as_slice());
        }
    };
    hide(&mut splice, "kv_transfer_params");
    if ids == TokenIdVisibility::None {
        hide(&mut splice, "prompt_token_ids");
        if let Some(choices) = without_token_ids(&fields) {
            splice.set("choices", choices);
        }
    }
    splice.finish()
}

/// An event of a stream without parameters of a transfer: vLLM tells them in the last event of `/v1/responses`. None where
/// it has none.
pub(super) fn redact_event(event: &Bytes) -> Option<Bytes> {
    const NAME: &str = "\"kv_transfer_params\"";
    // Every event comes by here: a search in text looks at many bytes at once.
    let has = match std::str::from_utf8(event) {
        Ok(text) => text.contains(NAME),
        Err(_) => event.windows(NAME.len()).any(|window| window == NAME.as_bytes()),
    };
    if !has {
        return None;
    }
    let from = event.windows(5).position(|window| window == b"data:")? + 5;
    let to = from + event[from..].iter().position(|byte| *byte == b'\n')?;
    let fields = JsonFields::scan(Bytes::copy_from_slice(event[from..to].trim_ascii()), &[]).ok()?;
    let inner = fields.get("response").filter(|inner| inner.starts_with(b"{"));
    let inner = inner.map(|inner| redact_answer(&fields.body().slice_ref(inner), TokenIdVisibility::All));
    let mut splice = JsonSplice::new(&fields);
    if let Some(inner) = &inner {
        splice.set("response", &**inner);
    }
    let payload = redact_answer(&splice.finish(), TokenIdVisibility::All);
    Some([&event[..from], b" ".as_slice(), &payload, &event[to..]].concat().into())
}

/// The choices without token ids, where they have any.
fn without_token_ids(answer: &JsonFields) -> Option<Vec<u8>> {
    const IDS: [&str; 2] = ["token_ids", "prompt_token_ids"];
    let choices: Vec<&RawValue> = answer.read("choices")?;
    let (mut out, mut had) = (vec![b'['], false);
    for choice in choices {
        let fields = JsonFields::scan(Bytes::copy_from_slice(choice.get().as_bytes()), &[]).ok()?;
        let mut splice = JsonSplice::new(&fields);
        for name in IDS.into_iter().filter(|name| fields.has(name)) {
            splice.set(name, b"null".as_slice());
            had = true;
        }
        if out.len() > 1 {
            out.push(b',');
        }
        out.extend_from_slice(&splice.finish());
    }
    out.push(b']');
    had.then_some(out)
}

#[cfg(test)]
mod tests;
