//! The `tojson` filter as `transformers` defines it: Python's `json.dumps`, not Jinja's HTML-safe variant.

use std::borrow::Cow;
use std::fmt::Write;

use minijinja::value::{Kwargs, ObjectRepr, Rest, ValueKind};
use minijinja::{Error, ErrorKind, Value};

use crate::python::{self, ExponentFloat};
use crate::template_value::{SmallObject, entries};

/// Maximum nesting, deeper than JSON bodies can be; a template that nests further is broken.
const MAX_DEPTH: usize = 160;
const MAX_INDENT: usize = 64;
/// Initial capacity of the output in bytes.
const USUAL: usize = 256;

/// `tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
pub(crate) fn filter(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let style = match args.is_empty() && kwargs.assert_all_used().is_ok() {
        true => JsonStyle::DEFAULT,
        false => JsonStyle::of(&args, &kwargs)?,
    };
    let mut writer = JsonWriter { out: String::with_capacity(USUAL), style: &style, depth: 0 };
    writer.value(value)?;
    Ok(Value::from(writer.out))
}

struct JsonStyle {
    ascii: bool,
    indent: Option<String>,
    comma: Cow<'static, str>,
    colon: Cow<'static, str>,
    sort: bool,
}

impl JsonStyle {
    /// Style without any arguments.
    const DEFAULT: Self =
        Self { ascii: false, indent: None, comma: Cow::Borrowed(", "), colon: Cow::Borrowed(": "), sort: false };

    fn of(args: &[Value], kwargs: &Kwargs) -> Result<Self, Error> {
        let names = ["ensure_ascii", "indent", "separators", "sort_keys"];
        let argument = |position: usize| -> Result<Value, Error> {
            let named = kwargs.get::<Option<Value>>(names[position])?;
            Ok(named.or_else(|| args.get(position).cloned()).unwrap_or_default())
        };
        let indent = indent(&argument(1)?)?;
        let (comma, colon) = separators(&argument(2)?, indent.as_deref())?;
        let style = Self { ascii: argument(0)?.is_true(), indent, comma, colon, sort: argument(3)?.is_true() };
        kwargs.assert_all_used()?;
        Ok(style)
    }
}

fn indent(argument: &Value) -> Result<Option<String>, Error> {
    if argument.is_none() || argument.is_undefined() {
        return Ok(None);
    }
    if let Some(text) = argument.as_str() {
        return Ok(Some(text.chars().take(MAX_INDENT).collect()));
    }
    match argument.as_i64() {
        Some(spaces) if spaces <= MAX_INDENT as i64 => Ok(Some(" ".repeat(spaces.max(0) as usize))),
        _ => Err(Error::new(ErrorKind::InvalidOperation, "tojson: indent must be a small number or a string")),
    }
}

fn separators(argument: &Value, indent: Option<&str>) -> Result<(Cow<'static, str>, Cow<'static, str>), Error> {
    if argument.is_none() || argument.is_undefined() {
        return Ok((if indent.is_some() { "," } else { ", " }.into(), ": ".into()));
    }
    match argument.try_iter()?.collect::<Vec<_>>().as_slice() {
        [comma, colon] => Ok((comma.to_string().into(), colon.to_string().into())),
        _ => Err(Error::new(ErrorKind::InvalidOperation, "tojson: separators must be a pair")),
    }
}

struct JsonWriter<'a> {
    out: String,
    style: &'a JsonStyle,
    depth: usize,
}

impl JsonWriter<'_> {
    fn value(&mut self, value: &Value) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.number(value)?,
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq => self.list(value)?,
            ValueKind::Map => self.object(value)?,
            ValueKind::Iterable if value.as_object().is_some_and(|o| o.repr() == ObjectRepr::Iterable) => {
                self.list(value)?
            }
            ValueKind::Plain if value.downcast_object_ref::<ExponentFloat>().is_some() => {
                let _ = write!(self.out, "{value}");
            }
            kind => {
                return Err(Error::new(ErrorKind::BadSerialization, format!("tojson: {kind} is not JSON")));
            }
        }
        Ok(())
    }

    fn number(&mut self, value: &Value) -> Result<(), Error> {
        if value.is_integer() {
            let _ = write!(self.out, "{value}");
            return Ok(());
        }
        self.out.push_str(&python::float(f64::try_from(value.clone())?));
        Ok(())
    }

    fn list(&mut self, value: &Value) -> Result<(), Error> {
        self.open('[')?;
        let mut items = 0;
        for item in value.try_iter()? {
            self.separate(items);
            self.value(&item)?;
            items += 1;
        }
        self.close(']', items);
        Ok(())
    }

    fn object(&mut self, value: &Value) -> Result<(), Error> {
        match value.downcast_object_ref::<SmallObject>() {
            Some(fields) if !self.style.sort => return self.pairs(fields.entries()),
            _ => {}
        }
        let mut pairs: Vec<(Value, Value)> = entries(value).collect();
        if self.style.sort {
            pairs.sort_by_cached_key(|(key, _)| key.to_string());
        }
        self.pairs(&pairs)
    }

    fn pairs(&mut self, pairs: &[(Value, Value)]) -> Result<(), Error> {
        self.open('{')?;
        for (before, (key, value)) in pairs.iter().enumerate() {
            self.separate(before);
            self.key(key)?;
            self.out.push_str(&self.style.colon);
            self.value(value)?;
        }
        self.close('}', pairs.len());
        Ok(())
    }

    fn key(&mut self, key: &Value) -> Result<(), Error> {
        if let Some(text) = key.as_str() {
            self.string(text);
            return Ok(());
        }
        self.out.push('"');
        self.value(key)?;
        self.out.push('"');
        Ok(())
    }

    fn open(&mut self, bracket: char) -> Result<(), Error> {
        self.depth += 1;
        self.out.push(bracket);
        match self.depth > MAX_DEPTH {
            true => Err(Error::new(ErrorKind::BadSerialization, "tojson: nested too deeply")),
            false => Ok(()),
        }
    }

    /// Writes what precedes an item with `before` items before it.
    fn separate(&mut self, before: usize) {
        if before > 0 {
            self.out.push_str(&self.style.comma);
        }
        self.line();
    }

    fn close(&mut self, bracket: char, items: usize) {
        self.depth -= 1;
        if items > 0 {
            self.line();
        }
        self.out.push(bracket);
    }

    fn line(&mut self) {
        if let Some(indent) = &self.style.indent {
            self.out.push('\n');
            for _ in 0..self.depth {
                self.out.push_str(indent);
            }
        }
    }

    /// Writes a quoted string; runs without characters to escape are copied whole.
    fn string(&mut self, text: &str) {
        self.out.reserve(text.len() + 2);
        self.out.push('"');
        let mut from = 0;
        for (at, c) in text.char_indices() {
            if !matches!(c, '"' | '\\' | '\0'..='\u{1f}') && (c.is_ascii() || !self.style.ascii) {
                continue;
            }
            self.out.push_str(&text[from..at]);
            from = at + c.len_utf8();
            self.escape(c);
        }
        self.out.push_str(&text[from..]);
        self.out.push('"');
    }

    fn escape(&mut self, c: char) {
        match c {
            '"' => self.out.push_str("\\\""),
            '\\' => self.out.push_str("\\\\"),
            '\n' => self.out.push_str("\\n"),
            '\r' => self.out.push_str("\\r"),
            '\t' => self.out.push_str("\\t"),
            '\u{8}' => self.out.push_str("\\b"),
            '\u{c}' => self.out.push_str("\\f"),
            _ => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    let _ = write!(self.out, "\\u{unit:04x}");
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use minijinja::Environment;

    use super::*;
    use crate::template_value::TemplateValue;

    fn render(json: &str, call: &str) -> Result<String, Error> {
        let mut environment = Environment::new();
        environment.add_filter("tojson", filter);
        let value = serde_json::from_str::<TemplateValue>(json).unwrap().0;
        environment.render_str(&format!("{{{{ x | {call} }}}}"), minijinja::context! { x => value })
    }

    fn check(json: &str, call: &str, expected: &str) {
        assert_eq!(render(json, call).unwrap(), expected, "{json} {call}");
    }

    #[test]
    fn html_is_not_escaped_and_unicode_is_preserved() {
        check(r#"{"b":"<a href='x'>&","a":"é 🌍"}"#, "tojson", r#"{"b": "<a href='x'>&", "a": "é 🌍"}"#);
    }

    #[test]
    fn ensure_ascii_uses_surrogate_pairs() {
        check(r#""é🌍""#, "tojson(ensure_ascii=true)", r#""\u00e9\ud83c\udf0d""#);
        check(r#""é""#, "tojson(true)", r#""\u00e9""#);
    }

    #[test]
    fn control_characters_use_python_escapes() {
        check(r#""\u0000\b\t\n\f\r\u001f\u007f\"\\/""#, "tojson", "\"\\u0000\\b\\t\\n\\f\\r\\u001f\u{7f}\\\"\\\\/\"");
    }

    #[test]
    fn indented_output_matches_json_dumps() {
        check(
            r#"{"a":[1,{"b":[]}],"c":{}}"#,
            "tojson(indent=2)",
            "{\n  \"a\": [\n    1,\n    {\n      \"b\": []\n    }\n  ],\n  \"c\": {}\n}",
        );
        check("[1,2]", "tojson(indent='\t')", "[\n\t1,\n\t2\n]");
        check("[1,2]", "tojson(indent=0)", "[\n1,\n2\n]");
        check("[1,2]", "tojson(indent=none)", "[1, 2]");
    }

    #[test]
    fn separators_and_sort_keys_are_honored() {
        check(r#"{"b":1,"a":[2,3]}"#, "tojson(separators=(',', ':'))", r#"{"b":1,"a":[2,3]}"#);
        check(r#"{"b":1,"a":[2,3]}"#, "tojson(sort_keys=true)", r#"{"a": [2, 3], "b": 1}"#);
    }

    #[test]
    fn numbers_and_constants_print_as_in_python() {
        check("[1,-2.0,1e-7,1e5,true,false,null]", "tojson", "[1, -2.0, 1e-07, 100000.0, true, false, null]");
    }

    #[test]
    fn undefined_values_bad_indents_and_unknown_options_are_rejected() {
        assert!(render("{}", "attr('missing') | tojson").is_err());
        for call in ["tojson(indent=[])", "tojson(indent=1000)", "tojson(separators=(','))", "tojson(cls=1)"] {
            assert!(render("1", call).is_err(), "{call}");
        }
    }
}
