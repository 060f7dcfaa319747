//! Finds the literals that a template searches for in message contents.
//!
//! It errs towards too many: a conversation in which a user's text contains one of them is computed in full.

/// Calls that search a text for a literal.
const SEARCH_CALLS: [&str; 12] = [
    "startswith(",
    "endswith(",
    "split(",
    "rsplit(",
    "partition(",
    "rpartition(",
    "find(",
    "rfind(",
    "index(",
    "rindex(",
    "count(",
    "removeprefix(",
];

/// Returns the literals, without surrounding white space.
pub(crate) fn content_literals(template: &str) -> Vec<Box<str>> {
    let mut words: Vec<Box<str>> = Vec::new();
    for literal in literals(template).filter(TemplateStringLiteral::is_searched_for) {
        let word = unescape(literal.text);
        let word = word.trim();
        if !word.is_empty() && !words.iter().any(|known| **known == *word) {
            words.push(word.into());
        }
    }
    words
}

/// A quoted string in one of a template's tags.
struct TemplateStringLiteral<'a> {
    before: &'a str,
    text: &'a str,
    after: &'a str,
}

impl TemplateStringLiteral<'_> {
    fn is_searched_for(&self) -> bool {
        let before = self.before.trim_end();
        if SEARCH_CALLS.iter().any(|call| before.ends_with(call)) {
            return true;
        }
        let after = self.after.trim_start();
        let searched =
            after.strip_prefix("not ").map_or(after, str::trim_start).strip_prefix("in ").map(str::trim_start);
        searched.is_some_and(|searched| !is_list(searched) && (!is_name(self.text) || is_content_expression(searched)))
    }
}

/// Returns whether this looks like a field name. Field names are searched for in messages, other literals in texts.
fn is_name(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

fn is_list(searched: &str) -> bool {
    searched.starts_with(['[', '('])
}

/// Returns whether the searched expression is, judging by its name, message content.
fn is_content_expression(searched: &str) -> bool {
    let ends = |c: char| !(c.is_ascii_alphanumeric() || "_.[]'\"".contains(c));
    let name = searched.split(ends).next().unwrap_or_default();
    ["content", "text"].iter().any(|word| name.contains(word))
}

fn literals(template: &str) -> impl Iterator<Item = TemplateStringLiteral<'_>> {
    tags(template).flat_map(|tag| {
        let mut at = 0;
        std::iter::from_fn(move || {
            let start = at + tag[at..].find(['"', '\''])?;
            let quote = tag.as_bytes()[start];
            let length = end_of(&tag.as_bytes()[start + 1..], quote)?;
            let (before, text) = (&tag[..start], &tag[start + 1..start + 1 + length]);
            at = start + length + 2;
            Some(TemplateStringLiteral { before, text, after: &tag[at..] })
        })
    })
}

fn end_of(text: &[u8], quote: u8) -> Option<usize> {
    let mut at = 0;
    while *text.get(at)? != quote {
        at += if text[at] == b'\\' { 2 } else { 1 };
    }
    Some(at)
}

/// Returns the contents of `{% %}` and `{{ }}` tags. A tag with its own end marker in quotes is cut short there,
/// which at worst yields a literal that is none.
fn tags(template: &str) -> impl Iterator<Item = &str> {
    let mut rest = template;
    std::iter::from_fn(move || {
        let start = [rest.find("{%"), rest.find("{{")].into_iter().flatten().min()?;
        let (opening, tag) = rest[start..].split_at(2);
        let end = tag.find(if opening == "{%" { "%}" } else { "}}" }).unwrap_or(tag.len());
        rest = tag.get(end + 2..).unwrap_or("");
        Some(&tag[..end])
    })
}

fn unescape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        out.extend(match c {
            '\\' => match chars.next() {
                Some('n') => Some('\n'),
                Some('t') => Some('\t'),
                Some('r') => Some('\r'),
                other => other,
            },
            c => Some(c),
        });
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(template: &str, expected: &[&str]) {
        let words = content_literals(template);
        assert_eq!(words.iter().map(|word| &**word).collect::<Vec<_>>(), expected, "{template}");
    }

    #[test]
    fn literals_searched_for_in_content_are_found() {
        check("{%- if m.content.startswith('<a>') and m.content.endswith(\"</a>\") %}x{% endif %}", &["<a>", "</a>"]);
        check("{% set x = '<b>' in c %}{% if \"c-d\" not in message['content'] %}", &["<b>", "c-d"]);
        check("{{ '/no' in content }}{{ m.content.split('</t>')[-1].lstrip('\\n') }}", &["/no", "</t>"]);
        check("{% if 'json' in visible_text(content) or 'json' in message.content %}", &["json"]);
        check("{% if 'it\\'s\\n' in content %}{% if 'it\\'s' in content %}", &["it's"]);
    }

    #[test]
    fn role_names_field_names_and_printed_text_are_not_literals() {
        check("{% if m.role == 'user' or m.role in ['a', 'b'] %}{{ '<|im_start|>' + m['content'] }}{% endif %}", &[]);
        check("{% if 'tool_calls' in message and 'name' not in message %}<think> in content{% endif %}", &[]);
        check("{% if '-' in ['-'] %}{{ ' ' in content }}", &[]);
    }

    #[test]
    fn malformed_templates_do_not_panic() {
        for odd in ["{%", "{{ '", "{% 'a\\", "{% 'a' in", "%}{{ \"}} in content\" }}", "{{}}{%%}", "{{ 'é' in content"]
        {
            content_literals(odd);
        }
    }

    #[test]
    fn literals_of_committed_templates_are_found() {
        let template = |family: &str| {
            let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
            std::fs::read_to_string(root.join("testdata/models").join(family).join("chat_template.jinja")).unwrap()
        };
        check(&template("glm45"), &["tool_response", "/nothink", "</think>", "<think>"]);
        check(&template("qwen_like"), &["<tool_response>", "</tool_response>", "</think>", "<think>"]);
        check(&template("chatml"), &[]);
    }
}
