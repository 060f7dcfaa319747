//! HTML helpers.

use std::fmt::Write as _;

/// Escapes text for HTML.
pub(super) fn escaped(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    text.replace('"', "&quot;").replace('\'', "&#39;")
}

/// Returns a table with a header row, which can be focused and scrolled by keyboard.
pub(super) fn table(name: &str, rows: &[Vec<String>]) -> String {
    let Some((head, body)) = rows.split_first() else { return String::new() };
    let name = escaped(name);
    let mut html =
        format!("<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"{name}\"><table><thead><tr>");
    head.iter().for_each(|cell| _ = write!(html, "<th scope=\"col\">{}</th>", escaped(cell)));
    html += "</tr></thead><tbody>";
    for row in body {
        let own = row.first().is_some_and(|policy| policy == "ownerserve");
        html += if own { "<tr class=\"own\">" } else { "<tr>" };
        for (column, cell) in row.iter().enumerate() {
            let cell = worded(&escaped(cell));
            _ = if column == 0 {
                write!(html, "<th scope=\"row\">{cell}</th>")
            } else {
                write!(html, "<td>{cell}</td>")
            };
        }
        html += "</tr>";
    }
    html + "</tbody></table></div>"
}

/// Colours the two verdict words.
fn worded(cell: &str) -> String {
    for (word, class) in [("PASS", "pass"), ("SHORT", "short")] {
        if let Some(rest) = cell.strip_prefix(word) {
            return format!("<span class=\"{class}\">{word}</span>{rest}");
        }
    }
    cell.to_owned()
}

/// Returns a table in a collapsed section.
pub(super) fn collapsible_table(name: &str, rows: &[Vec<String>]) -> String {
    format!("<details><summary>Table: {}</summary>{}</details>", escaped(name), table(name, rows))
}

pub(super) fn figure(name: &str, drawing: &str) -> String {
    format!("<figure><figcaption>{}</figcaption>{drawing}</figure>", escaped(name))
}
