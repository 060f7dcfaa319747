//! Properties of a chat template that decide how requests of other endpoints are converted for it.

use smart_default::SmartDefault;

use crate::{ChatBody, PrefixError};

/// Where a template accepts system messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AllowedSystemPosition {
    Anywhere,
    /// Only at the beginning; the conversion moves all of them there.
    Head,
}

/// Template properties that vLLM probes at startup, before it converts. The default is for models without a template:
/// their prompts are compared as bytes and must only grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, SmartDefault)]
pub(crate) struct ConversionTraits {
    #[default(AllowedSystemPosition::Anywhere)]
    pub(crate) system_placement: AllowedSystemPosition,
    /// The `reasoning_effort` that replaces `thinking.type: no_thinking_effort`.
    #[default("low")]
    pub(crate) no_thinking_effort: &'static str,
}

impl ConversionTraits {
    /// Probes the template, which `render` renders. Effort `none` disables thinking only if the template renders it
    /// differently from all other efforts.
    pub(crate) fn probe(
        render: impl Fn(&ChatBody) -> Result<String, PrefixError>,
        system_placement: AllowedSystemPosition,
    ) -> Self {
        let prompt = |effort: &str| {
            let body = format!(r#"{{"reasoning_effort":"{effort}","messages":[{{"role":"user","content":"Hi"}}]}}"#);
            render(&ChatBody::parse(body.as_bytes()).ok()?).ok()
        };
        let none = prompt("none");
        let ignores_effort =
            none.is_some() && ["low", "medium", "high", "xhigh", "max"].into_iter().all(|e| prompt(e) != none);
        Self { system_placement, no_thinking_effort: if ignores_effort { "none" } else { "low" } }
    }
}
