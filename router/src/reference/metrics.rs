//! Page of all metric families, from the registry.

use super::markdown::{MarkdownPage, code, code_list, joined, prose, sentence};
use proxy::telemetry::FamilyDescription;

const NOTES: &str = "The operators' listener serves all metrics at `/metrics` in Prometheus's text format. A histogram has the \
                     series `_bucket`, `_sum` and `_count`. Values of a label that are listed exist from the start; other \
                     series appear when they are first counted.";

/// Returns the page.
pub(super) fn page(families: &[FamilyDescription]) -> String {
    let mut page = MarkdownPage::new("Metrics");
    page.paragraph(NOTES);
    let mut rows: Vec<[String; 4]> = families.iter().map(row).collect();
    rows.sort();
    page.table(["metric", "type", "labels", "description"], &rows);
    page.into_text()
}

fn row(family: &FamilyDescription) -> [String; 4] {
    let labels = family.labels.iter().map(|(name, values)| match values.is_empty() {
        true => code(name),
        false => format!("{} ({})", code(name), code_list(values.iter().map(String::as_str))),
    });
    let labels: Vec<String> = labels.collect();
    [code(&family.name), family.kind.into(), labels.join("; "), joined(&[sentence(&prose(&family.help))])]
}
