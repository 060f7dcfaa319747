//! KV that a target offers for the next step with its answer, and the answer without what its client may not see.
//!
//! Transfer parameters never reach a client: they contain host names and block ids.

use std::borrow::Cow;
use std::sync::LazyLock;

use bytes::Bytes;
use memchr::memmem::Finder;
use serde::Deserialize;
use serde_json::value::RawValue;
use vocabulary::Tokens;

use super::ClientTokenIdVisibility;
use super::splice::{JsonSplice, ScannedJson};

/// Parameters that one decode leg returned, for exactly one prefill leg of the session's next step, whose prompt must
/// begin with the same tokens.
///
/// Not `Clone`, and consumed by the leg that sends it. Its Debug output hides them.
#[derive(PartialEq, Eq)]
pub struct ReversePullParams {
    parameters: Bytes,
    tokens: Tokens,
}

impl std::fmt::Debug for ReversePullParams {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReversePullParams").field("tokens", &self.tokens).finish_non_exhaustive()
    }
}

impl ReversePullParams {
    /// Returns how many leading tokens of prompt and answer can be fetched.
    pub fn tokens(&self) -> Tokens {
        self.tokens
    }

    /// Returns the JSON object exactly as the engine wrote it.
    pub(super) fn into_parameters(self) -> Bytes {
        self.parameters
    }

    /// Parses transfer parameters. Returns None unless the engine keeps blocks and gives all that a fetching engine
    /// needs, which would hang otherwise.
    pub(super) fn of(raw: &RawValue) -> Option<Self> {
        let fields: ReversePullFields<'_> = serde_json::from_str(raw.get()).ok()?;
        let texts = [&fields.remote_request_id, &fields.remote_engine_id, &fields.remote_host];
        let has_names = texts.iter().all(|text| text.as_ref().is_some_and(|text| !text.is_empty()));
        let has_blocks = fields.remote_block_ids.iter().flatten().any(|group| !group.is_empty());
        let is_complete = fields.do_remote_decode == Some(true)
            && fields.do_remote_prefill == Some(false)
            && has_names
            && has_blocks
            && fields.remote_port.is_some();
        let tokens = fields.remote_num_tokens.filter(|tokens| is_complete && *tokens > 0)?;
        // Copied, so that the rest of the answer can be freed.
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

/// Returns the token ids of prompt and answer, if the engine reports them and there is one choice.
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
    let mut ids_by_choice: AnswerTokenIds = serde_json::from_slice(answer).ok()?;
    let choice = ids_by_choice.choices.pop().filter(|_| ids_by_choice.choices.is_empty())?;
    let mut ids = ids_by_choice.prompt_token_ids.or(choice.prompt_token_ids)?;
    ids.extend(choice.token_ids?);
    Some(ids)
}

/// Removes from a complete answer what its client may not see.
pub fn redact_answer(answer: &Bytes, ids: ClientTokenIdVisibility) -> Bytes {
    let Ok(fields) = ScannedJson::scan(answer.clone(), &[]) else { return answer.clone() };
    let mut splice = JsonSplice::new(&fields);
    let hide = |splice: &mut JsonSplice<'_>, name| {
        if fields.has_any(name) {
            splice.set(name, b"null".as_slice());
        }
    };
    hide(&mut splice, "kv_transfer_params");
    if ids == ClientTokenIdVisibility::None {
        hide(&mut splice, "prompt_token_ids");
        if let Some(choices) = without_token_ids(&fields) {
            splice.set("choices", choices);
        }
    }
    splice.finish()
}

/// Removes transfer parameters from a stream event: vLLM puts them into the last event of `/v1/responses`. None if it
/// has none.
pub(super) fn redact_event(event: &Bytes) -> Option<Bytes> {
    // Made once: a search of a short event takes less time than making it.
    static NAME: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"kv_transfer_params\""));
    NAME.find(event)?;
    let (mut out, mut is_redacted) = (Vec::with_capacity(event.len()), false);
    for line in event.split_inclusive(|byte| *byte == b'\n') {
        match redact_line(line) {
            Some(redacted) => {
                out.extend(redacted);
                is_redacted = true;
            }
            None => out.extend_from_slice(line),
        }
    }
    is_redacted.then(|| out.into())
}

/// Removes transfer parameters from a line of a stream event. None if it has none.
fn redact_line(line: &[u8]) -> Option<Vec<u8>> {
    let data = line.strip_prefix(b"data:")?;
    let payload = data.trim_ascii();
    let start = line.len() - data.trim_ascii_start().len();
    let fields = ScannedJson::scan(Bytes::copy_from_slice(payload), &[]).ok()?;
    let inner = fields.get("response").filter(|inner| inner.starts_with(b"{"));
    let inner = inner.map(|inner| redact_answer(&fields.body().slice_ref(inner), ClientTokenIdVisibility::All));
    let mut splice = JsonSplice::new(&fields);
    if let Some(inner) = &inner {
        splice.set("response", &**inner);
    }
    let redacted = redact_answer(&splice.finish(), ClientTokenIdVisibility::All);
    (redacted != payload).then(|| [&line[..start], &redacted, &line[start + payload.len()..]].concat())
}

/// Returns the choices without token ids; None if they have none.
fn without_token_ids(answer: &ScannedJson) -> Option<Vec<u8>> {
    const IDS: [&str; 2] = ["token_ids", "prompt_token_ids"];
    let choices: Vec<&RawValue> = answer.read("choices")?;
    let (mut out, mut has_ids) = (vec![b'['], false);
    for choice in choices {
        let fields = ScannedJson::scan(Bytes::copy_from_slice(choice.get().as_bytes()), &[]).ok()?;
        let mut splice = JsonSplice::new(&fields);
        for name in IDS.into_iter().filter(|name| fields.has_any(name)) {
            splice.set(name, b"null".as_slice());
            has_ids = true;
        }
        if out.len() > 1 {
            out.push(b',');
        }
        out.extend_from_slice(&splice.finish());
    }
    out.push(b']');
    has_ids.then_some(out)
}

#[cfg(test)]
mod tests;
