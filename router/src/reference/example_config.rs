//! `configs/ownerserve.toml` as data: its settings and sections with their comments.
//!
//! A comment of the form `# name = value` or `# [section]` shows a setting that has no default. Other comments describe:
//! those in front of a setting or section, and those behind it, which may go on below.

use toml::{Table, Value};

/// The file.
#[derive(Debug)]
pub(super) struct ParsedExampleConfig {
    /// Comment at its top.
    pub introduction: String,
    /// Sections in order.
    pub sections: Vec<ExampleSection>,
    /// Content, with the settings that are comments in the file.
    pub complete: Table,
}

/// A section of the file.
#[derive(Debug)]
pub(super) struct ExampleSection {
    /// Keys from the top; of a list, those of the list.
    pub path: Vec<String>,
    /// Whether it is one of a list.
    pub is_listed: bool,
    /// Its comment.
    pub description: String,
    /// Its settings in order.
    pub settings: Vec<ExampleSetting>,
}

/// A setting of the file.
#[derive(Debug)]
pub(super) struct ExampleSetting {
    /// Its key within the section.
    pub key: String,
    /// Its value as it is written.
    pub value: String,
    /// Its comment.
    pub description: String,
}

/// Where a comment belongs that goes on from the line before.
enum CommentOwner {
    Nothing,
    Section,
    Setting,
}

/// Stands for an empty line within a comment.
const PARAGRAPH: &str = "\n\n";

impl ParsedExampleConfig {
    /// Reads the file's text.
    pub(super) fn parse(text: &str) -> Result<Self, toml::de::Error> {
        let complete = text.lines().map(uncommented).collect::<Vec<_>>().join("\n").parse()?;
        let mut file = Self { introduction: String::new(), sections: Vec::new(), complete };
        let (mut pending, mut owner) = (String::new(), CommentOwner::Nothing);
        for line in text.lines() {
            if let Some(more) = continuation(line) {
                file.extend_comment(&owner, more);
                continue;
            }
            let (content, comment) = split_comment(uncommented(line));
            if content.starts_with('[') {
                let description = append(std::mem::take(&mut pending), comment);
                let (path, is_listed) = header_path(content)?;
                file.sections.push(ExampleSection { path, is_listed, description, settings: Vec::new() });
                owner = CommentOwner::Section;
            } else if let (Some((key, value)), Some(section)) = (content.split_once('='), file.sections.last_mut()) {
                let description = append(std::mem::take(&mut pending), comment);
                let (key, value) = (key.trim().to_owned(), value.trim().to_owned());
                section.settings.push(ExampleSetting { key, value, description });
                owner = CommentOwner::Setting;
            } else if line.trim().is_empty() {
                if file.introduction.is_empty() {
                    file.introduction = std::mem::take(&mut pending);
                }
                pending.clear();
            } else {
                pending = append(pending, if comment.is_empty() { PARAGRAPH } else { comment });
            }
        }
        Ok(file)
    }

    fn extend_comment(&mut self, owner: &CommentOwner, more: &str) {
        let Some(section) = self.sections.last_mut() else { return };
        let description = match (owner, section.settings.last_mut()) {
            (CommentOwner::Setting, Some(setting)) => &mut setting.description,
            (CommentOwner::Section, _) => &mut section.description,
            _ => return,
        };
        *description = append(std::mem::take(description), more);
    }
}

/// Returns a line without the `# ` in front of an example.
fn uncommented(line: &str) -> &str {
    let is_example = |rest: &&str| rest.starts_with('[') || rest.split(' ').nth(1) == Some("=");
    line.strip_prefix("# ").filter(is_example).unwrap_or(line)
}

/// Returns the comment of a line that continues the one before: it is indented, where need be behind a first `#`.
fn continuation(line: &str) -> Option<&str> {
    let indented = line.strip_prefix('#').unwrap_or(line);
    indented.starts_with("  ").then(|| indented.trim_start().strip_prefix('#')).flatten().map(str::trim)
}

/// Parts a line at the first `#` outside of quotes.
fn split_comment(line: &str) -> (&str, &str) {
    let mut quote = None;
    for (at, character) in line.char_indices() {
        match (quote, character) {
            (None, '#') => return (line[..at].trim(), line[at + 1..].trim()),
            (None, '"' | '\'') => quote = Some(character),
            (Some(open), _) if open == character => quote = None,
            _ => {}
        }
    }
    (line.trim(), "")
}

/// Returns the keys of a section's header, and whether it is one of a list.
fn header_path(header: &str) -> Result<(Vec<String>, bool), toml::de::Error> {
    let mut inner = Value::Table(header.parse()?);
    let mut path = Vec::new();
    loop {
        inner = match inner {
            Value::Table(table) => match table.into_iter().next() {
                Some((key, value)) => {
                    path.push(key);
                    value
                }
                None => return Ok((path, header.starts_with("[["))),
            },
            Value::Array(mut items) => items.pop().unwrap_or(Value::Table(Table::new())),
            _ => return Ok((path, header.starts_with("[["))),
        };
    }
}

/// Joins two parts of a comment.
fn append(mut text: String, more: &str) -> String {
    let is_within_line = !text.is_empty() && !text.ends_with(PARAGRAPH) && more != PARAGRAPH;
    if is_within_line && !more.is_empty() {
        text.push(' ');
    }
    text.push_str(more);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_belong_to_the_setting_or_section_they_stand_at() {
        let text = "# About the file.\n#\n# And more.\n\n\
                    # About one.\n[one]\na = \"#1\"   # first\n            # goes on\n# Before b.\n# b = 2\n\n\
                    # About two.\n# [[one.\"x.y\"]]   # each\n#            # of them\n# c = [3]\n";
        let file = ParsedExampleConfig::parse(text).unwrap();
        assert_eq!(file.introduction, "About the file.\n\nAnd more.");
        let sections: Vec<_> =
            file.sections.iter().map(|it| (it.path.join("/"), it.is_listed, &*it.description)).collect();
        assert_eq!(
            sections,
            [("one".into(), false, "About one."), ("one/x.y".into(), true, "About two. each of them")]
        );
        let settings = file.sections.iter().flat_map(|it| &it.settings);
        let settings: Vec<_> = settings.map(|it| (&*it.key, &*it.value, &*it.description)).collect();
        assert_eq!(settings, [("a", "\"#1\"", "first goes on"), ("b", "2", "Before b."), ("c", "[3]", "")]);
        assert_eq!(file.complete["one"]["x.y"][0]["c"][0].as_integer(), Some(3));
    }
}
