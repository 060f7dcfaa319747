//! Page of the operator API, from its OpenAPI document.

use std::collections::BTreeMap;

use serde_json::Value;

use super::markdown::{MarkdownPage, capitalized, code, code_list, joined, prose, sentence};
use crate::operator::ProblemKind;

const SCHEMAS: &str = "#/components/schemas/";

/// Returns the page.
pub(super) fn page(document: &Value) -> String {
    let mut page = MarkdownPage::new("API");
    page.paragraph(text(&document["info"]["description"]));
    page.paragraph(
        "[Problem types](#problem-types) lists the errors, [Objects](#objects) what bodies and responses consist of.",
    );
    let operations = operations(document);
    let rows: Vec<[String; 2]> = operations.iter().map(|it| [it.link(), prose(&it.summary())]).collect();
    page.table(["request", "what it does"], &rows);
    operations.iter().for_each(|operation| add_operation(&mut page, operation));
    add_problem_types(&mut page);
    page.heading(2, "Objects");
    for (name, schema) in sorted(&document["components"]["schemas"]) {
        page.heading(3, name);
        add_schema(&mut page, schema);
    }
    page.into_text()
}

struct Operation<'d> {
    method: String,
    path: &'d str,
    value: &'d Value,
}

impl Operation<'_> {
    fn title(&self) -> String {
        format!("{} {}", self.method, self.path)
    }

    /// Link to the heading, by mdBook's rule for its anchor.
    fn link(&self) -> String {
        let title = self.title().to_lowercase();
        let anchor = title.chars().filter(|c| c.is_alphanumeric() || matches!(c, '_' | '-' | ' '));
        format!("[{}](#{})", self.title(), anchor.map(|c| if c == ' ' { '-' } else { c }).collect::<String>())
    }

    fn summary(&self) -> String {
        sentence(text(&self.value["summary"]))
    }
}

/// Returns all operations, by path.
fn operations(document: &Value) -> Vec<Operation<'_>> {
    let paths = sorted(&document["paths"]).into_iter();
    let all =
        paths.flat_map(|(path, methods)| sorted(methods).into_iter().map(move |(method, value)| (path, method, value)));
    all.map(|(path, method, value)| Operation { method: method.to_ascii_uppercase(), path, value }).collect()
}

fn add_operation(page: &mut MarkdownPage, operation: &Operation<'_>) {
    let value = operation.value;
    // As code: mdBook takes braces at the end of a plain heading for attributes.
    page.heading(2, &code(&operation.title()));
    page.paragraph(&prose(&operation.summary()));
    page.paragraph(&prose(text(&value["description"])));
    let parameters = value["parameters"].as_array().into_iter().flatten();
    let rows: Vec<[String; 4]> = parameters
        .map(|it| {
            let required = if it["required"] == true { ", required" } else { "" };
            let location = format!("{}{required}", text(&it["in"]));
            [code(text(&it["name"])), location, type_name(&it["schema"]), described(&it["description"], &it["schema"])]
        })
        .collect();
    page.table(["parameter", "in", "type", "description"], &rows);
    for (_, content) in sorted(&value["requestBody"]["content"]) {
        let required = if value["requestBody"]["required"] == true { "" } else { " (optional)" };
        page.paragraph(&format!("Body{required}: {}.", type_name(&content["schema"])));
        add_fields(page, &content["schema"]);
    }
    let (problems, answers): (Vec<_>, Vec<_>) =
        sorted(&value["responses"]).into_iter().partition(|(_, response)| is_problem(response));
    let rows: Vec<[String; 3]> = answers
        .into_iter()
        .map(|(status, response)| {
            let content = sorted(&response["content"]).into_iter();
            let bodies: Vec<String> = content
                .map(|(kind, content)| match &content["schema"] {
                    Value::Null => code(kind),
                    schema => type_name(schema),
                })
                .collect();
            [status.to_owned(), bodies.join(", "), sentence(&prose(text(&response["description"])))]
        })
        .collect();
    page.table(["status", "body", "when"], &rows);
    let refused = problems.iter().map(|(status, response)| {
        let description = prose(text(&response["description"]));
        format!("{status} ({})", description.trim_end_matches('.').replace(';', ","))
    });
    let refused: Vec<String> = refused.collect();
    if !refused.is_empty() {
        page.paragraph(&format!("[Problems](#problem-types): {}.", refused.join(", ")));
    }
    for (status, response) in sorted(&value["responses"]) {
        for (_, content) in sorted(&response["content"]) {
            if has_own_fields(&content["schema"]) {
                page.paragraph(&format!("Fields of the {status} response:"));
                add_fields(page, &content["schema"]);
            }
        }
    }
}

/// Returns whether a response is a problem document and nothing else.
fn is_problem(response: &Value) -> bool {
    let mut kinds = sorted(&response["content"]).into_keys();
    matches!((kinds.next(), kinds.next()), (Some(kind), None) if kind.contains("problem"))
}

fn add_problem_types(page: &mut MarkdownPage) {
    use strum::VariantArray as _;
    page.heading(2, "Problem types");
    let rows: Vec<[String; 3]> = ProblemKind::VARIANTS
        .iter()
        .map(|kind| {
            let (status, title) = kind.status_and_title();
            [code(&kind.uri()), status.as_str().to_owned(), title.to_owned()]
        })
        .collect();
    page.table(["type", "status", "title"], &rows);
}

/// Adds what a named schema says.
fn add_schema(page: &mut MarkdownPage, schema: &Value) {
    page.paragraph(&sentence(&prose(text(&schema["description"]))));
    if has_own_fields(schema) {
        add_fields(page, schema);
    } else {
        page.paragraph(&format!("{}.", capitalized(&joined_type(schema))));
    }
}

fn joined_type(schema: &Value) -> String {
    let details = details(schema);
    if details.is_empty() {
        type_name(schema)
    } else {
        format!("{}. {}", type_name(schema), details.trim_end_matches('.'))
    }
}

/// Returns whether a schema lists fields itself, not by reference.
fn has_own_fields(schema: &Value) -> bool {
    schema["properties"].is_object()
        || parts(schema, "allOf").iter().any(|part| has_own_fields(part))
        || variants(schema).iter().any(|part| has_own_fields(part))
}

/// Adds the fields of a schema, a table for each variant.
fn add_fields(page: &mut MarkdownPage, schema: &Value) {
    let mut rows = Vec::new();
    collect_fields(schema, "", &mut rows);
    page.table(["field", "type", "description"], &rows);
    for part in parts(schema, "allOf").iter().filter(|part| part["$ref"].is_string()) {
        page.paragraph(&format!("And all fields of {}.", type_name(part)));
    }
    let variants: Vec<&Value> = variants(schema).into_iter().filter(|part| part["type"] != "null").collect();
    for variant in variants.iter().filter(|_| has_own_fields(schema)) {
        let about = sentence(&prose(text(&variant["description"])));
        page.paragraph(&if about.is_empty() { "Or:".to_owned() } else { about });
        match has_own_fields(variant) {
            true => add_fields(page, variant),
            false => page.paragraph(&format!("{}.", capitalized(&type_name(variant)))),
        }
    }
}

/// Collects the fields of an object and of the objects within it.
fn collect_fields(schema: &Value, above: &str, rows: &mut Vec<[String; 3]>) {
    for part in parts(schema, "allOf") {
        collect_fields(part, above, rows);
    }
    for (name, field) in sorted(&schema["properties"]) {
        let path = format!("{above}{name}");
        let is_required = schema["required"].as_array().is_some_and(|all| all.iter().any(|it| it == name));
        let optional = if is_required || !above.is_empty() { "" } else { " (optional)" };
        rows.push([code(&path), format!("{}{optional}", type_name(field)), described(&field["description"], field)]);
        let item = if field["items"].is_object() { &field["items"] } else { field };
        if item["properties"].is_object() {
            collect_fields(item, &format!("{path}."), rows);
        }
    }
}

fn described(description: &Value, schema: &Value) -> String {
    joined(&[sentence(&prose(text(description))), details(schema)])
}

/// Returns default and bounds of a value.
fn details(schema: &Value) -> String {
    let plain = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let labels = [
        ("default", "Default"),
        ("minimum", "Minimum"),
        ("maximum", "Maximum"),
        ("maxLength", "Longest"),
        ("pattern", "Pattern"),
    ];
    let labelled = labels.iter().filter(|(key, _)| !schema[key].is_null() && schema[key] != 0);
    let notes: Vec<String> = labelled.map(|(key, label)| format!("{label}: {}.", code(&plain(&schema[key])))).collect();
    notes.join(" ")
}

/// Returns a schema's type, as a link where it has a name.
fn type_name(schema: &Value) -> String {
    if let Some(reference) = schema["$ref"].as_str() {
        let name = reference.trim_start_matches(SCHEMAS);
        return format!("[{name}](#{})", name.to_lowercase());
    }
    let variants = variants(schema);
    if !variants.is_empty() {
        let names: Vec<String> = variants.into_iter().map(type_name).collect();
        return names.join(" or ");
    }
    if let [part] = parts(schema, "allOf")[..] {
        return type_name(part);
    }
    if let Some(words) = schema["enum"].as_array() {
        return format!("one of {}", code_list(words.iter().filter_map(Value::as_str)));
    }
    if !schema["const"].is_null() {
        return code(schema["const"].as_str().unwrap_or_default());
    }
    match &schema["type"] {
        Value::Array(kinds) => {
            let names: Vec<String> = kinds.iter().map(|kind| plain_type_name(text(kind), schema)).collect();
            names.join(" or ")
        }
        kind => plain_type_name(text(kind), schema),
    }
}

fn plain_type_name(kind: &str, schema: &Value) -> String {
    match kind {
        "array" => format!("list of {}", type_name(&schema["items"])),
        "object" if schema["additionalProperties"].is_object() => {
            format!("map of {}", type_name(&schema["additionalProperties"]))
        }
        "" => "any".to_owned(),
        kind => kind.to_owned(),
    }
}

fn variants(schema: &Value) -> Vec<&Value> {
    [parts(schema, "oneOf"), parts(schema, "anyOf")].concat()
}

fn parts<'v>(schema: &'v Value, key: &str) -> Vec<&'v Value> {
    schema[key].as_array().into_iter().flatten().collect()
}

/// Returns the entries of an object by name: their order in the document depends on how `serde_json` was built.
fn sorted(value: &Value) -> BTreeMap<&str, &Value> {
    value.as_object().into_iter().flatten().map(|(name, value)| (name.as_str(), value)).collect()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}
