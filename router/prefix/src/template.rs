//! Renders chat templates as `apply_chat_template` of `transformers` does, within limits.

use std::fmt::{self, Write as _};
use std::io;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::ValueKind;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Output, State, Value, context};

use crate::content_format::ContentFormat;
use crate::conversion_traits::AllowedSystemPosition;
use crate::template_literals::content_literals;
use crate::template_value::object;
use crate::{PrefixError, PromptWorkLimits, WallTime, python, to_json};

const DEFAULT_TEMPLATE: &str = "chat_template";
const TOOL_TEMPLATE: &str = "tool_use";
/// Maximum macro nesting; the default of the template engine assumes a larger stack than server threads have.
const MAX_RECURSION: usize = 100;

/// Compiled templates of one model.
#[derive(Debug)]
pub(crate) struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    has_tool_template: bool,
    has_generation_tags: bool,
    content_literals: Vec<Box<str>>,
    format: ContentFormat,
    /// Maximum bytes of output.
    max_rendered_bytes: usize,
}

/// A template's text, and the separate template that some models use for requests with tools.
#[derive(Clone, Debug)]
pub(crate) struct TemplateTexts {
    pub plain: String,
    pub with_tools: Option<String>,
}

impl ChatTemplate {
    /// Compiles a model's templates.
    pub(crate) fn compile(text: TemplateTexts, limits: &PromptWorkLimits) -> Result<Self, PrefixError> {
        let longest = usize::try_from(limits.rendered_bytes.0).unwrap_or(usize::MAX);
        let mut environment = environment(limits, longest);
        let format = ContentFormat::of(&text.plain);
        let plain = without_generation_tags(&text.plain);
        let has_generation_tags = plain != text.plain;
        let mut heeds = content_literals(&text.plain);
        heeds.extend(text.with_tools.as_deref().map(content_literals).into_iter().flatten());
        environment.add_template_owned(DEFAULT_TEMPLATE, plain)?;
        let has_tool_template = text.with_tools.is_some();
        if let Some(with_tools) = text.with_tools {
            environment.add_template_owned(TOOL_TEMPLATE, without_generation_tags(&with_tools))?;
        }
        Ok(Self {
            environment,
            source: text.plain,
            has_tool_template,
            has_generation_tags,
            content_literals: heeds,
            format,
            max_rendered_bytes: longest,
        })
    }

    /// Returns the format in which message content must be given.
    pub(crate) fn content_format(&self) -> ContentFormat {
        self.format
    }

    /// Returns whether the template's text contains this field name.
    pub(crate) fn mentions(&self, field: &str) -> bool {
        self.source.contains(field)
    }

    /// Returns the literals that the template searches for in message contents, possibly to tell kinds of messages
    /// apart.
    pub(crate) fn content_literals(&self) -> &[Box<str>] {
        &self.content_literals
    }

    /// Returns where system messages are accepted. vLLM probes this with a plain engine without generation tags and
    /// functions.
    pub(crate) fn system_placement(&self) -> AllowedSystemPosition {
        let turns = ["system", "user", "system", "user"].map(|role| context! { role, content => "t" });
        let names = [Some(DEFAULT_TEMPLATE), self.has_tool_template.then_some(TOOL_TEMPLATE)];
        let refuses = |name| {
            let tried = self.environment.get_template(name);
            let variables = context! { messages => turns.to_vec(), add_generation_prompt => false };
            tried
                .and_then(|template| {
                    template
                        .render_captured_to(variables, &mut BoundedBuffer::new(0, self.max_rendered_bytes))
                        .map(drop)
                })
                .is_err()
        };
        match self.has_generation_tags || names.into_iter().flatten().any(refuses) {
            true => AllowedSystemPosition::Head,
            false => AllowedSystemPosition::Anywhere,
        }
    }

    /// Renders with these variables; also returns the number of engine steps.
    pub(crate) fn render(
        &self,
        mut variables: Vec<(Value, Value)>,
        now: WallTime,
        size: RenderSize,
    ) -> Result<(String, u64), Error> {
        let tools = variables.iter().any(|(name, value)| name.as_str() == Some("tools") && !value.is_none());
        let name = if tools && self.has_tool_template { TOOL_TEMPLATE } else { DEFAULT_TEMPLATE };
        variables.push((Value::from("strftime_now"), strftime_now(now)));
        let mut out = BoundedBuffer::new(size.hint, size.limit);
        let captured = self.environment.get_template(name)?.render_captured_to(object(variables), &mut out)?;
        let steps = captured.state().fuel_levels().map_or(0, |(spent, _)| spent);
        drop(captured);
        let text = String::from_utf8(out.bytes);
        let text = text.map_err(|_| Error::new(ErrorKind::BadSerialization, "rendered text is not UTF-8"))?;
        Ok((text, steps))
    }
}

/// Expected and maximum bytes of a rendering.
#[derive(Clone, Copy)]
pub(crate) struct RenderSize {
    pub hint: usize,
    pub limit: usize,
}

fn environment(limits: &PromptWorkLimits, longest: usize) -> Environment<'static> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.expect("the default delimiters are valid"));
    environment.set_recursion_limit(MAX_RECURSION);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_debug(false);
    environment.set_formatter(move |out, state, value| print(out, state, value, longest));
    environment.add_filter("string", move |value: &Value| {
        collection_text(value, longest).unwrap_or_else(|| bounded_text(value, longest))
    });
    environment.set_fuel(Some(limits.template_steps));
    environment.set_unknown_method_callback(python::call_method);
    environment.add_filter("tojson", to_json::filter);
    environment
        .add_filter("trim", move |value: &Value, chars: Option<&str>| trim(&bounded_text(value, longest)?, chars));
    environment.add_function("raise_exception", raise_exception);
    environment
}

/// Prints the value of a `{{ }}` expression.
fn print(out: &mut Output<'_>, state: &mut State<'_, '_>, value: &Value, longest: usize) -> Result<(), Error> {
    if let Some(text) = value.as_str() {
        // Fast path: most values are strings, and nothing is escaped.
        return Ok(out.write_str(text)?);
    }
    match collection_text(value, longest) {
        Some(text) => Ok(out.write_str(&text?)?),
        None => minijinja::escape_formatter(out, state, value),
    }
}

/// Text of a list or map: the template engine's own, except for characters that Python escapes.
fn collection_text(value: &Value, longest: usize) -> Option<Result<String, Error>> {
    let is_container = matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::Iterable);
    is_container.then(|| bounded_text(value, longest).map(python::escape_unprintable))
}

/// Returns a value's text, or an error if it is longer than a prompt may be: a short expression can build a list of
/// millions.
fn bounded_text(value: &Value, longest: usize) -> Result<String, Error> {
    let mut text = BoundedString { text: String::new(), limit: longest };
    match write!(text, "{value}") {
        Ok(()) => Ok(text.text),
        Err(_) => Err(Error::new(ErrorKind::InvalidOperation, "a value's text is over the prompt's limit")),
    }
}

/// String that refuses to grow beyond its limit.
struct BoundedString {
    text: String,
    limit: usize,
}

impl fmt::Write for BoundedString {
    fn write_str(&mut self, more: &str) -> fmt::Result {
        if self.text.len() + more.len() > self.limit {
            return Err(fmt::Error);
        }
        self.text.push_str(more);
        Ok(())
    }
}

/// Trims like Jinja; an undefined value is the empty string.
fn trim(text: &str, chars: Option<&str>) -> Result<String, Error> {
    Ok(match chars {
        Some(chars) => text.trim_matches(|c| chars.contains(c)).to_owned(),
        None => text.trim_matches(python::is_space).to_owned(),
    })
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

fn strftime_now(now: WallTime) -> Value {
    Value::from_function(move |format: &str| {
        now.format(format).ok_or_else(|| {
            Error::new(ErrorKind::InvalidOperation, format!("strftime_now({format:?}): a directive is not supported"))
        })
    })
}

/// Removes `{% generation %}` tags, which only mark model output for training; their contents stay.
fn without_generation_tags(template: &str) -> String {
    let mut out = String::with_capacity(template.len());
    let mut rest = template;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        // A tag's `%` begins no end: `{%}` is open.
        let Some(end) = tag[2..].find("%}").map(|end| end + 2) else {
            rest = tag;
            break;
        };
        let inside = &tag[2..end];
        match inside.trim_matches(['-', '+']).trim() {
            "generation" => out.push_str(&tag[..end].replace("generation", "if true")),
            "endgeneration" => out.push_str(&tag[..end].replace("endgeneration", "endif")),
            _ => out.push_str(&tag[..end]),
        }
        out.push_str("%}");
        rest = &tag[end + 2..];
    }
    out.push_str(rest);
    out
}

/// Byte buffer that refuses to grow beyond its limit.
struct BoundedBuffer {
    bytes: Vec<u8>,
    limit: usize,
}

impl BoundedBuffer {
    fn new(expected: usize, limit: usize) -> Self {
        Self { bytes: Vec::with_capacity(expected.min(limit)), limit }
    }
}

impl io::Write for BoundedBuffer {
    fn write(&mut self, more: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + more.len() > self.limit {
            return Err(io::Error::other("the rendered prompt is over its limit"));
        }
        self.bytes.extend_from_slice(more);
        Ok(more.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests;
