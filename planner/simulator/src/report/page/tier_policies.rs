//! Section that compares tier policies.

use super::bars::{Bar, BarChart};
use super::html::{escaped, figure};
use super::scale::AxisScale;
use crate::report::{PolicySummary, SimulationReport, tier_policy_table};

/// Plots: title, and for each part its figure and name.
const PLOTS: [(&str, &[(&str, &str)]); 3] = [
    ("Step time, mean (s)", &[("step_mean_s", "step")]),
    ("Time to first token, p95 (s)", &[("ttft_p95_s", "first token")]),
    ("Restoring, all steps together (s)", &[("restore_host_s", "from host memory"), ("restore_disk_s", "from disk")]),
];

/// Returns the plots of each policy at each load under every requested tier policy, then the table.
pub(super) fn tier_policies(report: &SimulationReport) -> String {
    if report.tier_policies.is_empty() {
        return "<p>Only one tier policy was simulated; <code>--tier-policy none,lru,lowest_cost</code> runs every policy under each.</p>".to_owned();
    }
    let plots: String = PLOTS.iter().map(|(title, parts)| plot(report, title, parts)).collect();
    plots + &super::table("Tier policies", &tier_policy_table(&report.tier_policies))
}

fn plot(report: &SimulationReport, title: &str, parts: &[(&str, &str)]) -> String {
    let values = |summary: &PolicySummary| -> Vec<f64> {
        let all: Option<Vec<f64>> = parts.iter().map(|(name, _)| summary.mean(name).map(|mean| mean.mean)).collect();
        all.unwrap_or_default()
    };
    let names: Vec<&str> = parts.iter().map(|(_, name)| *name).collect();
    let bars = BarChart {
        title: format!("{title} by tier policy; the table below has the values"),
        parts: &names,
        unit: " s",
        scale: AxisScale::from_zero(report.tier_policies.iter().map(|cell| values(cell).iter().sum())),
    };
    let legend = super::sections::legend_of(&bars);
    let mut html = format!("<h3>{}</h3>{legend}<div class=\"grid\">", escaped(title));
    for (policy, load) in report.cells.iter().map(|cell| (cell.policy, cell.load)) {
        let at_load =
            report.tier_policies.iter().filter(|cell| cell.policy == policy && cell.load.total_cmp(&load).is_eq());
        let name = |summary: &PolicySummary| {
            summary.tier_policy.map_or_else(|| "-".to_owned(), |cache| cache.to_string()).into()
        };
        let rows: Vec<Bar> = at_load.map(|cell| Bar { name: name(cell), parts: values(cell) }).collect();
        html += &figure(&format!("{policy} at {load} {}", report.subject.load_is), &bars.plot(&rows));
    }
    html + "</div>"
}
