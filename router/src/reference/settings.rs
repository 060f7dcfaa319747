//! Page of all settings: names and types from the code, descriptions from the comments of `configs/ownerserve.toml`.

use serde::Deserialize as _;
use toml::{Table, Value};

use super::example_config::{ExampleSection, ExampleSetting, ParsedExampleConfig};
use super::markdown::{MarkdownPage, capitalized, code, code_list, joined, prose, sentence};
use super::setting_schema::SettingSchema;
use crate::config::Config;

/// The example that describes every setting; a test holds its values to the defaults.
const EXAMPLE: &str = include_str!("../../../configs/ownerserve.toml");

/// Folder of the book's pages, as comments name it.
const BOOK: &str = "docs/src/";

/// Units of durations and sizes, to tell both from other texts.
const DURATION_UNITS: [&str; 7] = ["ns", "us", "ms", "s", "m", "h", "d"];
const SIZE_UNITS: [&str; 9] = ["B", "KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"];

const NOTES: &str = "A section is a table of the TOML file given to `--config`; `--set PATH=VALUE` sets one value over it. \
                     Sections in double brackets may be repeated, and `NAME` stands for a name of your choice. A default \
                     of `unset` means that the router decides as the description says; `required` settings have no default.";

/// Returns the page.
pub(super) fn page() -> String {
    let example = ParsedExampleConfig::parse(EXAMPLE).expect("a test parses the example");
    let schema = SettingSchema::of::<Config>();
    let mut page = MarkdownPage::new("Settings");
    page.paragraph(&prose(&example.introduction));
    page.paragraph(NOTES);
    for section in &example.sections {
        add_section(&mut page, &example, &schema, section);
    }
    page.into_text()
}

fn add_section(
    page: &mut MarkdownPage,
    example: &ParsedExampleConfig,
    schema: &SettingSchema,
    section: &ExampleSection,
) {
    let (path, schema) = shown_path(schema, &section.path);
    let heading = if section.is_listed { format!("`[[{path}]]`") } else { format!("`[{path}]`") };
    page.heading(2, &heading);
    page.paragraph(&description(&section.description));
    let rows: Vec<[String; 4]> = section
        .settings
        .iter()
        .map(|setting| {
            let kind = schema.and_then(|schema| schema.child(&setting.key));
            let default = default_of(example, section, setting);
            let shown = if default == SettingDefault::Unset {
                format!("For example {}.", code(&setting.value))
            } else {
                String::new()
            };
            [
                code(&format!("{path}.{}", setting.key)),
                type_name(kind.map_or(&SettingSchema::Mixed, |(kind, _)| kind), &setting.value),
                default.shown(&setting.value),
                joined(&[description(&setting.description), shown]),
            ]
        })
        .collect();
    page.table(["setting", "type", "default", "description"], &rows);
}

/// Returns a comment as Markdown: a sentence, with pages of the book as links.
fn description(comment: &str) -> String {
    let markdown = sentence(&capitalized(&prose(comment)));
    let words = markdown.split(' ').map(|word| match word.trim_end_matches(['.', ',', ';']).strip_prefix(BOOK) {
        Some(page) => format!("[{page}](../{page}){}", &word[BOOK.len() + page.len()..]),
        None => word.to_owned(),
    });
    words.collect::<Vec<_>>().join(" ")
}

/// Returns a path with the names of maps replaced, and the schema at its end.
fn shown_path<'a>(schema: &'a SettingSchema, path: &'a [String]) -> (String, Option<&'a SettingSchema>) {
    let (mut shown, mut at) = (Vec::new(), Some(schema));
    for key in path {
        let below = at.and_then(|schema| schema.child(key));
        shown.push(below.map_or(key.as_str(), |(_, name)| name));
        at = below.map(|(schema, _)| schema);
    }
    (shown.join("."), at)
}

/// What happens without a setting.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum SettingDefault {
    /// The value in the example counts.
    Value,
    /// The value in the example does not count.
    Unset,
    /// The section is refused.
    Required,
}

impl SettingDefault {
    fn shown(self, value: &str) -> String {
        match self {
            Self::Value => code(value),
            Self::Unset => "unset".into(),
            Self::Required => "required".into(),
        }
    }
}

/// Loads the example without the setting, and compares.
fn default_of(example: &ParsedExampleConfig, section: &ExampleSection, setting: &ExampleSetting) -> SettingDefault {
    let load = |table: Table| Config::deserialize(Value::Table(table)).map(|config| format!("{config:?}"));
    let mut without = example.complete.clone();
    remove(&mut without, &section.path, &setting.key);
    match (load(example.complete.clone()), load(without)) {
        (Ok(with), Ok(without)) if with == without => SettingDefault::Value,
        (_, Ok(_)) => SettingDefault::Unset,
        (_, Err(_)) => SettingDefault::Required,
    }
}

fn remove(table: &mut Table, path: &[String], key: &str) {
    let Some((first, rest)) = path.split_first() else {
        table.remove(key);
        return;
    };
    match table.get_mut(first) {
        Some(Value::Table(inner)) => remove(inner, rest, key),
        Some(Value::Array(items)) => {
            items.iter_mut().filter_map(Value::as_table_mut).for_each(|item| remove(item, rest, key))
        }
        _ => {}
    }
}

/// Returns what is accepted. Durations and sizes are known by how the example writes them.
fn type_name(schema: &SettingSchema, value: &str) -> String {
    match schema {
        SettingSchema::Section(fields) => format!("table of {}", code_list(fields.iter().map(|(name, _)| *name))),
        SettingSchema::Map(value) => format!("table of {}", type_name(value, "")),
        SettingSchema::List(item) => format!("list of {}", type_name(item, "")),
        SettingSchema::OneOf(words) => format!("one of {}", code_list(words.iter().copied())),
        SettingSchema::Switch => "boolean".into(),
        SettingSchema::Integer => "integer".into(),
        SettingSchema::Number => "number".into(),
        SettingSchema::Text => "text".into(),
        SettingSchema::Mixed if value.starts_with('[') => "list of text".into(),
        SettingSchema::Mixed => mixed_type_name(value.trim_matches('"')).into(),
    }
}

fn mixed_type_name(value: &str) -> &'static str {
    if !value.starts_with(|c: char| c.is_ascii_digit()) {
        return "text";
    }
    let unit = value.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.' || c == '_').trim_start();
    match unit {
        "" => "number",
        unit if DURATION_UNITS.contains(&unit) => "duration",
        unit if SIZE_UNITS.contains(&unit) => "size",
        _ => "text",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Adds the settings of `schema` that are not in `value`.
    fn find_missing(schema: &SettingSchema, value: Option<&Value>, path: &str, missing: &mut Vec<String>) {
        let Some(value) = value else { return missing.push(path.to_owned()) };
        match schema {
            SettingSchema::Section(fields) => {
                for (name, field) in fields {
                    let path = if path.is_empty() { (*name).to_owned() } else { format!("{path}.{name}") };
                    find_missing(field, value.get(name), &path, missing);
                }
            }
            SettingSchema::Map(entry) => {
                let first = value.as_table().and_then(|table| table.values().next());
                find_missing(entry, first, &format!("{path}.NAME"), missing);
            }
            SettingSchema::List(item) if matches!(**item, SettingSchema::Section(_)) => {
                find_missing(item, value.get(0), path, missing);
            }
            _ => {}
        }
    }

    #[test]
    fn example_names_every_setting_of_the_code_and_no_other() {
        let example = ParsedExampleConfig::parse(EXAMPLE).unwrap();
        let mut missing = Vec::new();
        find_missing(&SettingSchema::of::<Config>(), Some(&Value::Table(example.complete.clone())), "", &mut missing);
        assert_eq!(missing, Vec::<String>::new(), "configs/ownerserve.toml lacks these settings");
        let unknown = Config::deserialize(Value::Table(example.complete)).err();
        assert!(unknown.is_none(), "configs/ownerserve.toml has what the code does not know: {}", unknown.unwrap());
    }

    #[test]
    fn example_describes_every_setting_once() {
        let example = ParsedExampleConfig::parse(EXAMPLE).unwrap();
        let mut bare = Vec::new();
        for section in &example.sections {
            let settings = section.settings.iter().filter(|setting| setting.description.is_empty());
            bare.extend(settings.map(|setting| format!("{}.{}", section.path.join("."), setting.key)));
        }
        assert_eq!(bare, Vec::<String>::new(), "configs/ownerserve.toml does not say what these are");
    }

    #[test]
    fn durations_and_sizes_are_told_from_other_values() {
        for (value, name) in [
            ("\"30s\"", "duration"),
            ("\"1.5h\"", "duration"),
            ("\"64MiB\"", "size"),
            ("\"10 MB\"", "size"),
            ("5", "number"),
            ("\"tcp://127.0.0.1:1\"", "text"),
            ("\"s\"", "text"),
            ("\"...\"", "text"),
            ("\"10.0.0.1:7400\"", "text"),
            ("[]", "list of text"),
        ] {
            assert_eq!(type_name(&SettingSchema::Mixed, value), name, "{value}");
        }
    }
}
