//! Sections of the page.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use super::bars::{Bar, BarChart};
use super::html::{collapsible_table, escaped, figure};
use super::lines::{Axis, PlotLine, PlotPoint, PointMarkers, plot};
use super::policies::legend;
use super::scale::{AxisScale, ScaleKind};
use crate::report::cells::with_confidence;
use crate::report::{Metric, PolicySummary, PredictionQuality, SimulationReport, StepBreakdown, ablation_table};

/// Figures plotted over the load: column name, title and scale.
const SWEEP: [(&str, &str, ScaleKind); 4] = [
    ("step_mean_s", "step time, mean (s)", ScaleKind::Logarithmic),
    ("ttft_p95_s", "time to first token, p95 (s)", ScaleKind::Logarithmic),
    ("session_mean_s", "session time, mean (s)", ScaleKind::Logarithmic),
    ("sessions_per_gpu_hour", "sessions finished per GPU-hour", ScaleKind::Linear),
];

pub(super) fn sweep(report: &SimulationReport) -> String {
    let mut html = String::new();
    if report.loads().len() < 2 {
        html += "<p>One load only: <code>--load 8,16,24,32</code> shows where each policy saturates.</p>";
    }
    html += "<p class=\"soft\">Upright lines are 95 % confidence over seeds.</p><div class=\"grid\">";
    for (name, title, steps) in SWEEP {
        html += &over_load(report, (name, title), steps);
    }
    html += &format!("</div>{}", legend(&report.policies()));
    let names: Vec<&str> = SWEEP.iter().map(|(name, ..)| *name).collect();
    html + &collapsible_table("load sweep", &with_confidence(&report.cells, &names))
}

fn over_load(report: &SimulationReport, (name, title): (&str, &str), steps: ScaleKind) -> String {
    let line = |policy: &&'static str| {
        let cells = report.cells.iter().filter(|cell| cell.policy == *policy);
        let mut points: Vec<PlotPoint> = cells
            .filter_map(|cell| cell.mean(name).map(|mean| (cell.load, mean)))
            .map(|(x, mean)| PlotPoint { x, y: mean.mean, half_interval: mean.confidence })
            .collect();
        points.sort_by(|a, b| a.x.total_cmp(&b.x));
        PlotLine { policy, points, markers: PointMarkers::Points }
    };
    let lines: Vec<PlotLine> = report.policies().iter().map(line).collect();
    let values = || lines.iter().flat_map(|line| &line.points);
    if values().next().is_none() {
        return figure(title, "<p class=\"soft\">Nothing was measured.</p>");
    }
    let x = Axis::at(format!("load: {}", report.subject.load_is), report.loads());
    let ends = |point: &PlotPoint| [point.y, point.y + point.half_interval.unwrap_or_default()];
    let scale = AxisScale::covering(values().flat_map(ends), steps);
    let y = Axis::new(title, scale);
    figure(title, &plot(&format!("{title} over the load; the table below has the values"), (&x, &y), &lines))
}

/// Selects the percentiles of a summary.
type PercentileSelector = fn(&PolicySummary) -> &Vec<f64>;

/// Returns the latency distributions of each load.
pub(super) fn latency(report: &SimulationReport) -> String {
    let kinds: [(&str, PercentileSelector); 2] =
        [("time to first token", |cell| &cell.ttft), ("step time", |cell| &cell.step)];
    let mut html = "<p class=\"soft\">Share of steps that took at most so long.</p><div class=\"grid\">".to_owned();
    for load in report.loads() {
        for (name, curve) in kinds {
            let name = format!("{name} at {load} {}", report.subject.load_is);
            html += &figure(&name, &distribution(&report.at(load), (&name, curve)));
        }
    }
    let _ = write!(html, "</div>{}", legend(&report.policies()));
    let names = [
        "measured",
        "ttft_mean_s",
        "ttft_p95_s",
        "ttft_p99_s",
        "small_step_ttft_p95_s",
        "small_step_ttft_p99_s",
        "step_mean_s",
    ];
    let names = [&names[..], &["step_p95_s", "session_mean_s", "tpot_mean_ms", "tpot_p99_ms"]].concat();
    html + &collapsible_table("latency", &with_confidence(&report.cells, &names))
}

fn distribution(cells: &[&PolicySummary], (name, curve): (&str, PercentileSelector)) -> String {
    let point = |(share, time): (usize, &f64)| PlotPoint { x: *time, y: share as f64, half_interval: None };
    let line = |summary: &&PolicySummary| {
        let points = curve(summary).iter().enumerate().map(point).collect();
        PlotLine { policy: summary.policy, points, markers: PointMarkers::LineOnly }
    };
    let lines: Vec<PlotLine> = cells.iter().map(line).collect();
    let times = lines.iter().flat_map(|line| line.points.iter().map(|point| point.x));
    let x = Axis::new("seconds", AxisScale::covering(times, ScaleKind::Logarithmic));
    let y = Axis::new("% of steps", AxisScale::from_zero([100.0].into_iter()));
    plot(&format!("distribution of {name}; the table below has percentiles"), (&x, &y), &lines)
}

pub(super) fn memory(report: &SimulationReport) -> String {
    let mut html = String::new();
    for (name, title, unit) in [
        ("duplicate_factor", "Duplicate factor: how often the average cached token lies in the fleet", ""),
        ("transferred_gb", "KV moved over links", " GB"),
    ] {
        let value = |summary: &PolicySummary| summary.mean(name).map(|mean| mean.mean).into_iter().collect();
        html += &per_load(report, (title, unit), (&[name], value));
    }
    html + &collapsible_table("copies, bytes and tokens", &with_confidence(&report.cells, &MEMORY))
}

const MEMORY: [&str; 17] = [
    "duplicate_factor",
    "transferred_gb",
    "prefill_mtok",
    "saved_mtok",
    "recomputed_mtok",
    "cache_hit_rate",
    "owner_hit_rate",
    "best_holder_hit_rate",
    "prefetched_share",
    "active_session_hbm_gb",
    "hbm_session_capacity",
    "occupancy",
    "restored_mtok",
    "disk_written_gb",
    "disk_read_gb",
    "disk_dropped_gb",
    "write_amplification",
];

pub(super) fn actions(report: &SimulationReport) -> String {
    let names: BTreeSet<&str> = report.cells.iter().flat_map(|cell| cell.actions.keys().copied()).collect();
    let names: Vec<&str> = names.into_iter().collect();
    if names.is_empty() {
        return "<p>No policy that ran has words for its actions; <code>ownerserve</code> has.</p>".to_owned();
    }
    let share = |summary: &PolicySummary, name: &str| 100.0 * summary.actions.get(name).copied().unwrap_or_default();
    let cells: Vec<&PolicySummary> = report.cells.iter().filter(|cell| !cell.actions.is_empty()).collect();
    let shares = |summary: &PolicySummary| {
        names.iter().map(|name| share(summary, name)).filter(|_| !summary.actions.is_empty()).collect()
    };
    let html = per_load(report, ("Share of steps that each way of serving was taken for", " %"), (&names, shares));
    let head = ["policy", "load"].iter().chain(&names).map(|name| (*name).to_owned()).collect();
    let row = |summary: &&PolicySummary| {
        let shares = names.iter().map(|name| format!("{:.2} %", share(summary, name)));
        [summary.policy.to_owned(), summary.load.to_string()].into_iter().chain(shares).collect()
    };
    let rows: Vec<Vec<String>> = std::iter::once(head).chain(cells.iter().map(row)).collect();
    html + &collapsible_table("action mix", &rows)
}

/// Returns the breakdown of step time.
pub(super) fn step_time(report: &SimulationReport) -> String {
    let names = Metric::ALL.iter().map(|metric| metric.name).filter(|name| name.starts_with("spent_"));
    let names: Vec<&str> = names.collect();
    let parts = |summary: &PolicySummary| {
        let part = |name: &&str| summary.mean(name).map(|mean| mean.mean).unwrap_or_default();
        names.iter().map(part).collect()
    };
    let html = per_load(report, ("Seconds of a step, mean", " s"), (&StepBreakdown::PARTS, parts));
    let names = [&names[..], &["step_mean_s", "decode_stall_share", "worker_utilization", "gap_utilization"]].concat();
    let restores =
        collapsible_table("what first tokens of restored steps waited for", &with_confidence(&report.cells, &RESTORES));
    html + &collapsible_table("where the time went", &with_confidence(&report.cells, &names)) + &restores
}

const RESTORES: [&str; 5] =
    ["restored_steps", "restore_host_s", "restore_disk_s", "restore_network_s", "restore_compute_s"];

/// Returns the ablations of OwnerServe.
pub(super) fn ablations(report: &SimulationReport) -> String {
    if report.ablations.is_empty() {
        return "<p>None was asked for: <code>--policy ablations</code> runs them beside <code>ownerserve</code>.</p>"
            .to_owned();
    }
    let what: BTreeSet<(&str, &str)> = report.ablations.iter().map(|worth| (worth.policy, worth.what)).collect();
    let items: String = what.iter().map(|(name, what)| format!("<dt>{name}</dt><dd>{}</dd>", escaped(what))).collect();
    let caption = "By OwnerServe whole at the same load: above 1, the part is worth that much.";
    let table = super::table("Figures without a part, by the whole's", &ablation_table(&report.ablations));
    format!("<p class=\"soft\">{caption}</p><dl>{items}</dl>{table}")
}

/// Returns the prediction quality of the time to first token, by action.
pub(super) fn predictions(report: &SimulationReport) -> String {
    let head =
        ["policy", "load", "action", "steps", "predicted (s)", "observed (s)", "error p50", "error p90", "bias p50"];
    let per_cent = |share: f64| format!("{:.1} %", 100.0 * share);
    let summary = |cell: &PolicySummary| -> Vec<Vec<String>> {
        let row = |(action, one): (&&str, &PredictionQuality)| {
            let labels = [cell.policy.to_owned(), cell.load.to_string(), (*action).to_owned(), one.steps.to_string()];
            let means = [one.predicted_mean, one.observed_mean].map(|seconds| format!("{seconds:.3}"));
            let offs = [one.error_p50, one.error_p90, one.bias_p50].map(per_cent);
            labels.into_iter().chain(means).chain(offs).collect()
        };
        cell.ttft_prediction.iter().map(row).collect()
    };
    let rows: Vec<Vec<String>> = report.cells.iter().flat_map(summary).collect();
    if rows.is_empty() {
        return "<p>No policy that ran foretells first tokens; <code>ownerserve</code> does.</p>".to_owned();
    }
    let rows: Vec<Vec<String>> = std::iter::once(head.map(str::to_owned).to_vec()).chain(rows).collect();
    let caption =
        "From being placed to the first token, as it was priced and as it came. A bias below zero flatters an action.";
    format!("<p class=\"soft\">{caption}</p>{}", super::table("TTFT prediction, by action", &rows))
}

/// Returns the wall-clock time of decisions.
pub(super) fn planning(report: &SimulationReport) -> String {
    if report.planning.is_empty() {
        return "<p>Nobody took the time.</p>".to_owned();
    }
    let head = ["policy", "decisions", "mean (µs)", "p50 (µs)", "p95 (µs)", "p99 (µs)"].map(str::to_owned).to_vec();
    let rows = report.planning.iter().map(|one| {
        let times =
            [one.micros.mean, one.micros.p50, one.micros.p95, one.micros.p99].map(|micros| format!("{micros:.1}"));
        [one.policy.to_owned(), one.micros.count.to_string()].into_iter().chain(times).collect()
    });
    let rows: Vec<Vec<String>> = std::iter::once(head).chain(rows).collect();
    let caption = "To place a step, by the clock of the machine that ran this; another run has other values.";
    format!("<p class=\"soft\">{caption}</p>{}", super::table("Planning overhead", &rows))
}

/// Returns one bar chart per load, all with the same scale.
fn per_load(
    report: &SimulationReport,
    (title, unit): (&str, &str),
    (parts, values): (&[&str], impl Fn(&PolicySummary) -> Vec<f64>),
) -> String {
    let all = report.cells.iter().map(|cell| values(cell).iter().sum());
    let bars = BarChart {
        title: format!("{title}; the table below has the values"),
        parts,
        unit,
        scale: AxisScale::from_zero(all),
    };
    let mut html = format!("<h3>{}</h3>{}<div class=\"grid\">", escaped(title), legend_of(&bars));
    for load in report.loads() {
        let cells = report.at(load);
        let rows: Vec<Bar> = cells.iter().map(|cell| Bar { name: cell.policy.into(), parts: values(cell) }).collect();
        html += &figure(&format!("at {load} {}", report.subject.load_is), &bars.plot(&rows));
    }
    html + "</div>"
}

pub(super) fn legend_of(bars: &BarChart<'_>) -> String {
    if bars.parts.len() > 1 { bars.legend() } else { String::new() }
}

pub(super) fn figures(report: &SimulationReport) -> String {
    let names: Vec<&str> = Metric::ALL.iter().map(|metric| metric.name).collect();
    super::table("Every figure", &with_confidence(&report.cells, &names))
}

pub(super) fn definitions(report: &SimulationReport) -> String {
    let mut list = "<dl>".to_owned();
    for definition in &report.definitions {
        let _ = write!(list, "<dt>{}</dt><dd>{}</dd>", definition.name, escaped(definition.what));
    }
    list + "</dl>"
}
