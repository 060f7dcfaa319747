//! The report as one self-contained HTML page without scripts. Every plot has a table, and everything is reachable by
//! keyboard.

mod bars;
mod html;
mod lines;
mod policies;
mod scale;
mod sections;
mod tier_policies;

use std::collections::BTreeSet;
use std::fmt::Write as _;

use super::{SimulationReport, verdict_table};
use html::{escaped, table};

const STYLE: &str = include_str!("page/style.css");
/// The page may use nothing but its own style.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'";

/// Returns the HTML page.
pub fn page(report: &SimulationReport) -> String {
    let policies = report.policies();
    let title = format!("OwnerServe simulation of {}", escaped(&report.subject.trace));
    let mut html = format!(
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" \
         content=\"width=device-width,initial-scale=1\"><meta http-equiv=\"Content-Security-Policy\" content=\"{CONTENT_SECURITY_POLICY}\">\
         <title>{title}</title><style>{STYLE}{}</style></head><body>",
        policies::rules(&policies)
    );
    let _ = write!(html, "<a class=\"skip\" href=\"#verdicts\">To the verdicts</a><header><h1>{title}</h1>");
    let _ = write!(html, "<p class=\"soft\">{}</p>{}</header><main>", subject(report), contents());
    if !report.notes.is_empty() {
        let items: String = report.notes.iter().map(|note| format!("<li>{}</li>", escaped(note))).collect();
        let _ = write!(html, "<ul class=\"notes\" aria-label=\"Notes\">{items}</ul>");
    }
    html += &policies::policy_checkboxes(&policies);
    for (id, name, section) in SECTIONS {
        let _ = write!(html, "<section id=\"{id}\"><h2>{name}</h2>{}</section>", section(report));
    }
    html + "</main></body></html>\n"
}

/// Section of the page: anchor, title, and content.
type Section = (&'static str, &'static str, fn(&SimulationReport) -> String);

/// All sections, from the top.
const SECTIONS: [Section; 12] = [
    ("verdicts", "OwnerServe beside the best baseline of each load", verdicts),
    ("sweep", "Load sweep", sections::sweep),
    ("latency", "Latency", sections::latency),
    ("memory", "Copies and bytes moved", sections::memory),
    ("tier-policies", "Tier policies", tier_policies::tier_policies),
    ("actions", "Action mix", sections::actions),
    ("time", "Where the time went", sections::step_time),
    ("ablations", "What each part is worth", sections::ablations),
    ("ttft-prediction", "TTFT prediction", sections::predictions),
    ("planning", "Planning overhead", sections::planning),
    ("figures", "Every figure", sections::figures),
    ("definitions", "Definitions", sections::definitions),
];

fn contents() -> String {
    let links: String = SECTIONS.iter().map(|(id, name, _)| format!("<a href=\"#{id}\">{name}</a>")).collect();
    format!("<nav aria-label=\"Sections\">{links}</nav>")
}

fn subject(report: &SimulationReport) -> String {
    let subject = &report.subject;
    let seeds: BTreeSet<u64> = report.runs.iter().map(|run| run.traffic.seed).collect();
    format!(
        "{} steps of {} sessions on {} workers of kind {} ({} GPUs), each with {} tokens of KV in device memory, {} in a \
         host tier and {} on disk. Loads are {}. {} runs: {} policies at {} loads with {} seeds. Times are virtual.",
        subject.steps,
        subject.sessions,
        subject.workers,
        subject.profile,
        subject.gpus,
        subject.device_tokens,
        subject.host_tokens,
        subject.disk_tokens,
        subject.load_is,
        report.runs.len(),
        report.policies().len(),
        report.loads().len(),
        seeds.len(),
    )
}

/// Returns the verdicts; the notes say why there are none.
fn verdicts(report: &SimulationReport) -> String {
    if report.verdicts.is_empty() {
        return "<p>No verdict.</p>".to_owned();
    }
    table("Verdicts", &verdict_table(&report.verdicts))
}

#[cfg(test)]
mod tests;
