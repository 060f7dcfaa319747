//! vLLM's bodies: what each leg of a plan is sent, made from the client's own by editing a few fields, and what the
//! answers carry.
//!
//! Transfer parameters belong to exactly one prompt and one use: sent with another prompt, or twice, they give HTTP 200
//! and wrong text. So nothing here keeps them, and a client's are always taken out.

use std::borrow::Cow;
use std::sync::Arc;

use serde::Deserialize;
use serde_json::value::RawValue;
use vocabulary::Tokens;

use super::splice::{Edit, Object, SpliceError};

/// The field that carries transfer parameters, in requests and answers.
pub const TRANSFER: &str = "kv_transfer_params";
/// The field of vLLM's own extras.
const EXTRAS: &str = "vllm_xargs";
/// An extra that makes the engine publish blocks again without a new copy, which confuses every index.
const REPORT_MODE: &str = "kv_cache_report_mode";
/// What the prefill leg asks for.
const PRODUCE: &str = r#"{"do_remote_decode":true,"do_remote_prefill":false}"#;

/// What the router changes in a client's body, whichever leg it is for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shaping {
    /// The tenant's cache salt, in place of the client's.
    pub salt: Option<Arc<str>>,
    /// Whether to ask for the usage event at the end of a stream.
    pub usage: UsageEvent,
}

/// The usage event of a stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UsageEvent {
    /// As the client has it.
    #[default]
    AsSent,
    /// Asked for by the router.
    Ask,
}

/// A body that may be sent, and what was taken out of the client's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shaped {
    /// The body.
    pub body: String,
    /// Names of the client's parameters that were taken out.
    pub stripped: Vec<&'static str>,
}

/// The client's body as an engine may see it: without transfer parameters, with the tenant's salt.
pub fn shape(body: &str, shaping: &Shaping) -> Result<Shaped, SpliceError> {
    let object = Object::scan(body)?;
    let mut edits = Vec::new();
    let mut stripped = Vec::new();
    if object.get(TRANSFER).is_some() {
        edits.push(Edit::Remove(TRANSFER));
        stripped.push(TRANSFER);
    }
    if let Some(extras) = object.get(EXTRAS).filter(|extras| extras.starts_with('{')) {
        let extras = Object::scan(extras)?;
        if extras.get(REPORT_MODE).is_some() {
            edits.push(Edit::Set(EXTRAS, extras.edited(&[Edit::Remove(REPORT_MODE)]).into()));
            stripped.push(REPORT_MODE);
        }
    }
    if let Some(salt) = &shaping.salt {
        edits.push(Edit::Set("cache_salt", quoted(salt)));
    }
    if shaping.usage == UsageEvent::Ask {
        edits.push(Edit::Set("stream_options", with_usage(object.get("stream_options"))?));
    }
    Ok(Shaped { body: object.edited(&edits), stripped })
}

fn with_usage(options: Option<&str>) -> Result<Cow<'static, str>, SpliceError> {
    const ASK: &str = r#"{"include_usage":true}"#;
    match options {
        None | Some("null") => Ok(ASK.into()),
        Some(options) => Ok(Object::scan(options)?.edited(&[Edit::Set("include_usage", "true".into())]).into()),
    }
}

fn quoted(text: &str) -> Cow<'static, str> {
    serde_json::Value::from(text).to_string().into()
}

/// One token and no stream: what a leg asks whose text nobody reads.
fn one_token(object: &Object<'_>) -> Vec<Edit<'static>> {
    let mut edits = vec![
        Edit::Set("stream", "false".into()),
        Edit::Set("max_tokens", "1".into()),
        Edit::Remove("min_tokens"),
        Edit::Remove("stream_options"),
    ];
    if object.get("max_completion_tokens").is_some() {
        edits.push(Edit::Set("max_completion_tokens", "1".into()));
    }
    edits
}

/// The prefill leg of a shaped body: compute the prompt, keep its blocks for a consumer.
pub fn prefill_leg(shaped: &str) -> Result<String, SpliceError> {
    let object = Object::scan(shaped)?;
    let mut edits = one_token(&object);
    edits.push(Edit::Set(TRANSFER, PRODUCE.into()));
    Ok(object.edited(&edits))
}

/// The decode leg: the shaped body with the producer's parameters, whole and unchanged.
pub fn decode_leg(shaped: &str, parameters: &RawValue) -> Result<String, SpliceError> {
    Ok(Object::scan(shaped)?.edited(&[Edit::Set(TRANSFER, parameters.get().into())]))
}

/// The decode leg for a client that has left: pulls the blocks, so that they are not stranded, and generates one token.
pub fn release_leg(shaped: &str, parameters: &RawValue) -> Result<String, SpliceError> {
    let object = Object::scan(shaped)?;
    let mut edits = one_token(&object);
    edits.push(Edit::Set(TRANSFER, parameters.get().into()));
    Ok(object.edited(&edits))
}

/// A prefix to be made present at another worker, named by its token ids: `/v1/completions` of one token.
#[derive(Clone, Copy, Debug)]
pub struct Replicate<'a> {
    /// Served model name.
    pub model: &'a str,
    /// The block-aligned prefix. Both legs must carry the same.
    pub prompt: &'a [u32],
    /// The tenant's cache salt.
    pub salt: Option<&'a str>,
}

impl Replicate<'_> {
    /// The leg at the worker that holds the prefix.
    pub fn source_leg(&self) -> String {
        self.leg(PRODUCE)
    }

    /// The leg at the worker that is to have it.
    pub fn target_leg(&self, parameters: &RawValue) -> String {
        self.leg(parameters.get())
    }

    fn leg(&self, parameters: &str) -> String {
        let model = quoted(self.model);
        let mut body = String::with_capacity(self.prompt.len() * 7 + parameters.len() + 160);
        body.push_str(r#"{"model":"#);
        body.push_str(&model);
        body.push_str(r#","prompt":["#);
        for (n, token) in self.prompt.iter().enumerate() {
            if n > 0 {
                body.push(',');
            }
            body.push_str(itoa::Buffer::new().format(*token));
        }
        body.push_str(r#"],"max_tokens":1,"temperature":0,"stream":false,"add_special_tokens":false"#);
        if let Some(salt) = self.salt {
            body.push_str(r#","cache_salt":"#);
            body.push_str(&quoted(salt));
        }
        body.push_str(r#","kv_transfer_params":"#);
        body.push_str(parameters);
        body.push('}');
        body
    }
}

/// What a whole answer tells beside its text.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    /// The producer's parameters, exactly as it wrote them.
    pub parameters: Option<Box<RawValue>>,
    /// Token counts.
    pub usage: Option<Usage>,
}

/// Token counts of one request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct Usage {
    /// Tokens of the prompt.
    #[serde(default)]
    pub prompt_tokens: Tokens,
    /// Tokens of the answer.
    #[serde(default)]
    pub completion_tokens: Tokens,
    #[serde(default)]
    prompt_tokens_details: Option<PromptDetails>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
struct PromptDetails {
    #[serde(default)]
    cached_tokens: Option<Tokens>,
}

impl Usage {
    /// Prompt tokens that the engine found in its cache; none where it does not say. vLLM leaves the details out at 0,
    /// so that 0 and silence look alike.
    pub fn cached(&self) -> Option<Tokens> {
        self.prompt_tokens_details?.cached_tokens
    }
}

impl Answer {
    /// Reads a whole answer. What is not an object, or of odd types, tells nothing.
    pub fn read(body: &[u8]) -> Self {
        #[derive(Deserialize)]
        struct Fields<'a> {
            #[serde(borrow, default)]
            kv_transfer_params: Option<&'a RawValue>,
            #[serde(borrow, default)]
            usage: Option<&'a RawValue>,
        }
        let Ok(fields) = serde_json::from_slice::<Fields<'_>>(body) else { return Self::default() };
        let object = |raw: &&RawValue| raw.get().starts_with('{');
        Self {
            parameters: fields.kv_transfer_params.filter(object).map(ToOwned::to_owned),
            usage: fields.usage.and_then(|raw| serde_json::from_str(raw.get()).ok()),
        }
    }
}

/// What the producer's parameters say that a router may look at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct Produced {
    /// Tokens that were computed or found, all of the prompt's.
    #[serde(default)]
    pub remote_num_tokens: Option<Tokens>,
    /// Of these, the ones that the producer found in its cache.
    #[serde(default)]
    pub remote_prefill_cached_tokens: Option<Tokens>,
}

impl Produced {
    /// Reads a producer's parameters.
    pub fn read(parameters: &RawValue) -> Self {
        serde_json::from_str(parameters.get()).unwrap_or_default()
    }

    /// Whether a consumer can use them: without a request id of the producer's, vLLM's consumer hangs.
    pub fn usable(parameters: &RawValue) -> bool {
        #[derive(Deserialize)]
        struct Named {
            remote_request_id: Option<String>,
        }
        serde_json::from_str::<Named>(parameters.get()).is_ok_and(|named| named.remote_request_id.is_some())
    }
}

#[cfg(test)]
mod tests;
