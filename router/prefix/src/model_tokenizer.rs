//! A model's tokenizer, special tokens and chat template, loaded once and shared.

use std::borrow::Cow;
use std::sync::Arc;

use minijinja::Value;
use vocabulary::Tokens;
use xxhash_rust::xxh3::Xxh3;

use crate::chat::{CallFieldOrder, TemplateVariables};
use crate::conversion_traits::{AllowedSystemPosition, ConversionTraits};
use crate::incremental_rendering::{HistorySummary, PlaceholderMessages, TemplateCapabilities};
use crate::model_files::ModelFiles;
use crate::python;
use crate::template::{ChatTemplate, RenderSize, TemplateTexts};
use crate::template_value::object;
use crate::token_checkpoint::tokenize;
use crate::tokenizer::TextTokenizer;
use crate::{
    ChatBody, FallbackReason, ModelTokenizerSource, PrefixError, PrefixStability, PromptWorkLimits, SpecialTokens,
    TemplateFault, TokenCheckpoint, TokenizedPrompt, WallTime,
};

/// Tag that `transformers` appends to find the end of a message to continue.
const CONTINUE_TAG: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// A tokenizer with its chat template. Immutable; share it behind an `Arc`.
#[derive(Debug)]
pub struct ModelTokenizer {
    tokenizer: TextTokenizer,
    template: Option<ChatTemplate>,
    template_file: &'static str,
    kind: PrefixStability,
    template_traits: ConversionTraits,
    placeholders: Option<PlaceholderMessages>,
    incremental_rendering: Option<TemplateCapabilities>,
    template_fault: Option<TemplateFault>,
    /// `bos_token` and other special tokens, as template variables.
    special_tokens: TemplateVariables,
    end_token_ids: Vec<u32>,
    digest: Arc<str>,
    limits: PromptWorkLimits,
}

#[derive(Debug)]
pub(crate) struct RenderedPrompt {
    pub(crate) text: String,
    /// Template engine steps of the rendering.
    pub(crate) steps: u64,
}

impl ModelTokenizer {
    /// Loads and verifies a model's text files with the default [`PromptWorkLimits`].
    pub fn load(source: ModelTokenizerSource<'_>) -> Result<Self, PrefixError> {
        Self::load_with_limits(source, PromptWorkLimits::default())
    }

    /// Loads and verifies a model's text files.
    pub fn load_with_limits(source: ModelTokenizerSource<'_>, limits: PromptWorkLimits) -> Result<Self, PrefixError> {
        let files = source.load_files()?;
        let mut config = parse_json("tokenizer_config.json", files.tokenizer_config.as_deref())?;
        let model = parse_json("config.json", files.config.as_deref())?;
        let generation = parse_json("generation_config.json", files.generation_config.as_deref())?;
        fill_missing(&mut config, parse_json("special_tokens_map.json", files.special_tokens_map.as_deref())?);
        let tokenizer = TextTokenizer::load(&files.tokenizer_json, &config, &limits)?;
        let text = template_text(&files, &config, &model);
        let digest = digest(&files.tokenizer_json, &config, text.as_ref());
        let template = text.map(|text| ChatTemplate::compile(text, &limits)).transpose()?;
        let mut loaded = Self {
            special_tokens: special_tokens(&config),
            end_token_ids: read_end_token_ids(&tokenizer, &config, &[&generation, &model]),
            kind: PrefixStability::Unsafe,
            template_traits: ConversionTraits::default(),
            placeholders: template
                .as_ref()
                .map(|template| PlaceholderMessages::of(template.content_format()))
                .transpose()?,
            incremental_rendering: None,
            template_fault: None,
            tokenizer,
            template,
            template_file: if files.chat_template.is_some() { "chat_template.jinja" } else { "tokenizer_config.json" },
            digest,
            limits,
        };
        let render = |chat: &ChatBody| loaded.render(chat, WallTime::default());
        let kind = PrefixStability::probe(render);
        let system = loaded.template.as_ref().map_or(AllowedSystemPosition::Head, ChatTemplate::system_placement);
        let template_traits = ConversionTraits::probe(render, system);
        let template_fault = loaded.template.as_ref().and_then(|_| TemplateFault::probe(render));
        loaded = Self { kind, template_traits, template_fault, ..loaded };
        loaded.incremental_rendering = TemplateCapabilities::probe(&loaded).filter(|_| loaded.template_fault.is_none());
        Ok(loaded)
    }

    /// Digest of tokenizer and template, equal on all routers of a cluster. Used as
    /// [`vocabulary::ModelNamespace::tokenizer`].
    pub fn digest(&self) -> &Arc<str> {
        &self.digest
    }

    /// Returns how the template treats earlier turns.
    pub fn prefix_stability(&self) -> PrefixStability {
        self.kind
    }

    /// Returns what is wrong with the template, as far as a short conversation shows it.
    pub fn template_fault(&self) -> Option<&TemplateFault> {
        self.template_fault.as_ref()
    }

    /// Returns the name of the file that the template was read from.
    pub fn template_file(&self) -> &'static str {
        self.template_file
    }

    /// Returns whether the model has a template, and so conversations can be rendered.
    pub fn has_template(&self) -> bool {
        self.template.is_some()
    }

    pub(crate) fn template_traits(&self) -> ConversionTraits {
        self.template_traits
    }

    /// Returns how prompts can be joined from a known and a new part, or `None` if they must be rendered in full.
    pub(crate) fn incremental_rendering(&self) -> Option<&TemplateCapabilities> {
        self.incremental_rendering.as_ref()
    }

    /// Returns the literals that the template searches for in message contents.
    pub(crate) fn content_literals(&self) -> &[Box<str>] {
        self.template.as_ref().map_or(&[], ChatTemplate::content_literals)
    }

    pub(crate) fn template_mentions(&self, word: &str) -> bool {
        self.template.as_ref().is_some_and(|template| template.mentions(word))
    }

    /// Maximum template engine steps per prompt.
    pub(crate) fn max_template_steps(&self) -> u64 {
        self.limits.template_steps
    }

    /// Maximum bytes of a rendered prompt.
    pub(crate) fn max_rendered_bytes(&self) -> usize {
        usize::try_from(self.limits.rendered_bytes.0).unwrap_or(usize::MAX)
    }

    /// Renders the prompt of a chat request.
    pub fn render(&self, chat: &ChatBody, now: WallTime) -> Result<String, PrefixError> {
        Ok(self.render_prompt(chat, now)?.text)
    }

    fn template(&self) -> Result<&ChatTemplate, PrefixError> {
        self.template.as_ref().ok_or(PrefixError::Unresolvable {
            reason: FallbackReason::UnsupportedTemplate,
            detail: "the model's folder has no chat template that can be rendered here",
        })
    }

    /// Renders the prompt of a chat request and counts the template engine's steps.
    pub(crate) fn render_prompt(&self, chat: &ChatBody, now: WallTime) -> Result<RenderedPrompt, PrefixError> {
        let template = self.template()?;
        let mut messages = chat.messages(template.content_format())?;
        let continued = match chat.continues_final_message() {
            true => Some(tag_final_message(template, &mut messages)?),
            false => None,
        };
        let messages = messages.into_iter().map(object).collect();
        let RenderedPrompt { text, steps } = self.render_template(messages, &chat.variables()?, (now, chat.bytes()))?;
        let text = match continued {
            Some(last) => cut_at_tag(text, &last)?,
            None => text,
        };
        Ok(RenderedPrompt { text, steps })
    }

    /// Renders placeholder messages for `before` followed by a request's messages, with `variables` instead of its
    /// own.
    pub(crate) fn render_appended(
        &self,
        (before, order): (&HistorySummary, CallFieldOrder),
        (chat, variables): (&ChatBody, &TemplateVariables),
        now: WallTime,
    ) -> Result<RenderedPrompt, PrefixError> {
        let more = chat.appended_messages(self.template()?.content_format())?;
        let mut messages = self.placeholders.as_ref().map_or_else(Vec::new, |elided| elided.messages(before, order));
        messages.extend(more.into_iter().map(object));
        self.render_template(messages, variables, (now, 2 * chat.bytes()))
    }

    fn render_template(
        &self,
        messages: Vec<Value>,
        variables: &TemplateVariables,
        (now, hint): (WallTime, usize),
    ) -> Result<RenderedPrompt, PrefixError> {
        let mut all = Vec::with_capacity(self.special_tokens.len() + variables.len() + 2);
        all.extend_from_slice(&self.special_tokens);
        all.extend_from_slice(variables);
        all.push(("messages".into(), messages.into()));
        let (text, steps) = self.template()?.render(all, now, RenderSize { hint, limit: self.max_rendered_bytes() })?;
        Ok(RenderedPrompt { text, steps })
    }

    /// Returns the token ids of a chat request's prompt.
    pub fn encode_chat(&self, chat: &ChatBody, now: WallTime) -> Result<Vec<u32>, PrefixError> {
        let special = if chat.adds_special_tokens() { SpecialTokens::With } else { SpecialTokens::Without };
        self.encode(&self.render(chat, now)?, special)
    }

    /// Returns the token ids of a chat request's prompt, reusing `checkpoint` as far as it applies.
    pub fn encode_chat_from_checkpoint(
        &self,
        chat: &ChatBody,
        now: WallTime,
        checkpoint: Option<&TokenCheckpoint>,
    ) -> Result<TokenizedPrompt, PrefixError> {
        self.encode_rendered(&self.render(chat, now)?, chat, checkpoint)
    }

    /// Tokenizes a chat request's rendered prompt.
    pub(crate) fn encode_rendered(
        &self,
        rendered: &str,
        chat: &ChatBody,
        checkpoint: Option<&TokenCheckpoint>,
    ) -> Result<TokenizedPrompt, PrefixError> {
        if rendered.is_empty() || self.template_fault.as_ref().is_some_and(TemplateFault::ignores_content) {
            let detail = "the chat template shows nothing of what is said";
            return Err(PrefixError::unresolvable(FallbackReason::TemplateError, detail));
        }
        match chat.adds_special_tokens() {
            // The special tokens that are added may depend on the whole text.
            true => {
                let ids = self.encode(rendered, SpecialTokens::With)?;
                Ok(TokenizedPrompt { ids, reused_tokens: Tokens::ZERO, next_checkpoint: None })
            }
            false => tokenize(rendered, checkpoint, (&self.tokenizer, &self.digest)),
        }
    }

    /// Tokenizes text.
    pub fn encode(&self, text: &str, special: SpecialTokens) -> Result<Vec<u32>, PrefixError> {
        self.tokenizer.encode(text, special)
    }

    /// Decodes token ids. Unknown ids are skipped; invalid bytes become U+FFFD.
    pub fn decode(&self, ids: &[u32], special: SpecialTokens) -> Result<String, PrefixError> {
        self.tokenizer.decode(ids, special)
    }

    /// Number of distinct tokens. Ids of sparse vocabularies may be larger.
    pub fn vocab_size(&self) -> usize {
        self.tokenizer.vocab_size()
    }

    /// Token ids that end a response; empty if no file names one.
    pub fn end_token_ids(&self) -> &[u32] {
        &self.end_token_ids
    }

    /// Returns whether an id is a special token.
    pub fn is_special(&self, id: u32) -> bool {
        self.tokenizer.is_special(id)
    }

    /// Returns the ids of all special tokens.
    pub fn special_ids(&self) -> impl Iterator<Item = u32> {
        self.tokenizer.special_ids()
    }

    /// Returns the id of a token, given its text.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.tokenizer.token_id(token)
    }

    pub(crate) fn tokenizer(&self) -> &TextTokenizer {
        &self.tokenizer
    }
}

/// Appends the tag to the text to continue and returns the original text.
fn tag_final_message(template: &ChatTemplate, messages: &mut [TemplateVariables]) -> Result<String, PrefixError> {
    let refused = |detail| PrefixError::unresolvable(FallbackReason::Malformed, detail);
    let content = messages.last_mut().and_then(|last| last.iter_mut().find(|(key, _)| key.as_str() == Some("content")));
    let Some((_, content)) = content.filter(|_| template.mentions("content")) else {
        return Err(refused("continue_final_message: the template takes no content"));
    };
    if let Some(text) = content.as_str().map(str::to_owned) {
        *content = Value::from(format!("{text}{CONTINUE_TAG}"));
        return Ok(text);
    }
    let mut parts: Vec<Value> = content.try_iter()?.collect();
    let text_of = |part: &Value| part.get_attr("text").ok().and_then(|text| text.as_str().map(str::to_owned));
    let last = parts.iter_mut().rev().find_map(|part| text_of(part).map(|text| (part, text)));
    let (part, text) = last.ok_or_else(|| refused("continue_final_message: the last message has no text"))?;
    *part = Value::from_pairs([("type", Value::from("text")), ("text", Value::from(format!("{text}{CONTINUE_TAG}")))]);
    *content = Value::from(parts);
    Ok(text)
}

/// Truncates the rendering at the tag, and also the white space before it if the template trims.
fn cut_at_tag(mut rendered: String, text: &str) -> Result<String, PrefixError> {
    let missing = PrefixError::unresolvable(
        FallbackReason::TemplateError,
        "continue_final_message: the final message does not appear in the rendered prompt",
    );
    let Some(at) = rendered.rfind(CONTINUE_TAG.trim_end()) else { return Err(missing) };
    if !rendered.contains(text.trim_matches(python::is_space)) {
        return Err(missing);
    }
    let keeps_space = rendered[at..].starts_with(CONTINUE_TAG);
    let end = if keeps_space { at } else { rendered[..at].trim_end_matches(python::is_space).len() };
    rendered.truncate(end);
    Ok(rendered)
}

type Json = serde_json::Value;

fn parse_json(file: &'static str, bytes: Option<&[u8]>) -> Result<Json, PrefixError> {
    let Some(bytes) = bytes else { return Ok(Json::Null) };
    serde_json::from_slice(bytes).map_err(|source| PrefixError::File { file, source })
}

/// Adds the entries that the config lacks.
fn fill_missing(config: &mut Json, more: Json) {
    if config.is_null() {
        *config = Json::Object(serde_json::Map::new());
    }
    if let (Some(config), Json::Object(more)) = (config.as_object_mut(), more) {
        for (key, value) in more {
            config.entry(key).or_insert(value);
        }
    }
}

/// Returns the template's text, or `None` if the engine is known to render this model by other means.
fn template_text(files: &ModelFiles<'_>, config: &Json, model: &Json) -> Option<TemplateTexts> {
    if model["model_type"] == "gpt_oss" {
        return None;
    }
    if let Some(bytes) = &files.chat_template {
        return Some(TemplateTexts { plain: String::from_utf8_lossy(bytes).into_owned(), with_tools: None });
    }
    let owned = |json: &Json| json.as_str().map(str::to_owned);
    let named = |name| {
        let list = config["chat_template"].as_array()?;
        list.iter().find(|entry| entry["name"] == name).and_then(|entry| owned(&entry["template"]))
    };
    let plain = owned(&config["chat_template"]).or_else(|| named("default"))?;
    Some(TemplateTexts { plain, with_tools: named("tool_use") })
}

fn token_text(token: &Json) -> Option<&str> {
    token.as_str().or_else(|| token["content"].as_str())
}

/// Returns every `*_token` entry that is text.
fn special_tokens(config: &Json) -> TemplateVariables {
    let entries = config.as_object().into_iter().flatten();
    let tokens = entries.filter(|(key, _)| key.ends_with("_token"));
    tokens.filter_map(|(key, token)| Some((Value::from(key.as_str()), Value::from(token_text(token)?)))).collect()
}

fn read_end_token_ids(tokenizer: &TextTokenizer, config: &Json, files: &[&Json]) -> Vec<u32> {
    let id = |json: &Json| json.as_u64().and_then(|id| u32::try_from(id).ok());
    let declared = files.iter().map(|file| &file["eos_token_id"]).find(|ids| !ids.is_null());
    let mut ids: Vec<u32> = match declared {
        Some(Json::Array(list)) => list.iter().filter_map(id).collect(),
        Some(one) => id(one).into_iter().collect(),
        None => Vec::new(),
    };
    ids.extend(token_text(&config["eos_token"]).and_then(|token| tokenizer.token_id(token)));
    ids.sort_unstable();
    ids.dedup();
    ids
}

/// xxh3-128 over everything that determines token ids, each part preceded by its length.
fn digest(tokenizer: &[u8], config: &Json, template: Option<&TemplateTexts>) -> Arc<str> {
    let special = config.as_object().into_iter().flatten();
    let special = special.filter(|(key, _)| key.ends_with("_token") || *key == "added_tokens_decoder");
    let special: Vec<String> = special.map(|(key, value)| format!("{key}={value}")).collect();
    let plain = template.map_or("", |text| text.plain.as_str());
    let with_tools = template.and_then(|text| text.with_tools.as_deref()).unwrap_or("");
    let mut hash = Xxh3::new();
    let parts = [Cow::Borrowed(tokenizer), Cow::Owned(special.join("\n").into_bytes())];
    for part in parts.iter().map(|part| &**part).chain([plain.as_bytes(), with_tools.as_bytes()]) {
        hash.update(&(part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    format!("xxh3:{:032x}", hash.digest128()).into()
}

#[cfg(test)]
mod tests;
