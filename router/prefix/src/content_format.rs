//! Whether a template takes message content as a list of parts or as one string. Engines derive it from the
//! template's text: a loop over a message's content means parts.

/// Format of `message.content` that a template expects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ContentFormat {
    /// One string; text parts are joined by line feeds.
    Text,
    /// A list of parts, even if the client sent a string.
    Parts,
}

impl ContentFormat {
    /// Applies vLLM's rule: parts if a `for` loop runs over `NAME.content` and another loop takes NAME from the
    /// messages.
    pub(crate) fn of(template: &str) -> Self {
        let loops: Vec<(&str, &str)> = statements(template).filter_map(for_loop).collect();
        let sources = message_lists(template);
        let is_parts = loops.iter().any(|(_, over)| {
            content_owner(over)
                .is_some_and(|owner| loops.iter().any(|(item, list)| *item == owner && sources.contains(&base(list))))
        });
        if is_parts { Self::Parts } else { Self::Text }
    }
}

/// Returns the contents of all `{% ... %}` tags.
fn statements(template: &str) -> impl Iterator<Item = &str> {
    template
        .split("{%")
        .skip(1)
        .filter_map(|rest| rest.split_once("%}"))
        .map(|(inside, _)| inside.trim_start_matches(['-', '+']).trim_end_matches(['-', '+']).trim())
}

/// Parses `for ITEM in LIST [if ...]` into (ITEM, LIST).
fn for_loop(statement: &str) -> Option<(&str, &str)> {
    let (item, list) = statement.strip_prefix("for ")?.split_once(" in ")?;
    let list = list.split(" if ").next().unwrap_or(list);
    Some((item.trim(), list.trim_end_matches("recursive").trim()))
}

/// Returns `messages` and every name set from it.
fn message_lists(template: &str) -> Vec<&str> {
    let sets: Vec<(&str, &str)> = statements(template)
        .filter_map(|statement| statement.strip_prefix("set ")?.split_once('='))
        .map(|(name, value)| (name.trim(), value.trim()))
        .collect();
    let mut names = vec!["messages"];
    let mut at = 0;
    while at < names.len() {
        let known = names[at];
        for (name, value) in &sets {
            if base(value) == known && !names.contains(name) {
                names.push(name);
            }
        }
        at += 1;
    }
    names
}

/// Strips filters and slices from an expression: `messages[1:] | list` becomes `messages`.
fn base(expression: &str) -> &str {
    let unfiltered = expression.split('|').next().unwrap_or(expression).trim();
    match unfiltered.split_once('[') {
        Some((name, index)) if index.contains(':') && index.ends_with(']') => name.trim(),
        _ => unfiltered,
    }
}

/// Returns NAME from `NAME.content` or `NAME['content']`.
fn content_owner(expression: &str) -> Option<&str> {
    let access = base(expression);
    let owner = access
        .strip_suffix(".content")
        .or_else(|| access.strip_suffix("['content']"))
        .or_else(|| access.strip_suffix("[\"content\"]"))?;
    owner.chars().all(|c| c.is_alphanumeric() || c == '_').then_some(owner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(template: &str, expected: ContentFormat) {
        assert_eq!(ContentFormat::of(template), expected, "{template}");
    }

    #[test]
    fn loop_over_message_content_selects_the_parts_format() {
        check("{% for m in messages %}{% for p in m.content %}{% endfor %}{% endfor %}", ContentFormat::Parts);
        check("{%- for m in messages -%}{%- for p in m['content'] -%}x{%- endfor -%}", ContentFormat::Parts);
        check("{%- for m in messages[1:] -%}{%- for p in m[\"content\"] | list -%}", ContentFormat::Parts);
        check("{% set rest = messages[1:] %}{% for m in rest %}{% for p in m.content %}", ContentFormat::Parts);
        check("{% for m in messages %}{% for p in m.content if p.type == 'text' %}", ContentFormat::Parts);
    }

    #[test]
    fn other_uses_of_content_select_the_text_format() {
        check("{% for m in messages %}{{ m.content }}{% endfor %}", ContentFormat::Text);
        check("{% macro text(content) %}{% for p in content %}{% endfor %}{% endmacro %}", ContentFormat::Text);
        check("{% for d in documents %}{% for p in d.content %}", ContentFormat::Text);
        check("{% for m in messages %}{% set c = m.content %}{% for p in c %}", ContentFormat::Text);
        check("{% for m in messages %}{% for p in m.tool.content %}", ContentFormat::Text);
        check("", ContentFormat::Text);
        check("{% for m in messages", ContentFormat::Text);
    }
}
