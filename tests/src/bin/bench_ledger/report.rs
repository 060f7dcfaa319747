//! Prints the results line by line, each with its goal.

use std::fmt::Write;

use serde::Serialize;

use crate::load::LoadStats;
use crate::scale::ScaleResults;

/// Results of writes with this many clients.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
pub(crate) struct WriteResults {
    pub(crate) nodes: usize,
    pub(crate) clients: u64,
    /// The disk's own fdatasync, measured between these runs.
    pub(crate) fdatasync: LoadStats,
    /// Writes from inside a router's process.
    pub(crate) embedded: LoadStats,
    /// Writes over gRPC, in the same way as to etcd.
    pub(crate) ours: LoadStats,
    pub(crate) etcd: LoadStats,
}

/// All results.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub(crate) struct LedgerBenchResults {
    pub(crate) fdatasync: LoadStats,
    pub(crate) writes: Vec<WriteResults>,
    pub(crate) scale: Option<ScaleResults>,
}

/// Formats the table.
pub(crate) fn table(results: &LedgerBenchResults) -> String {
    let mut out = String::new();
    let LoadStats { rate, p50, p99 } = results.fdatasync;
    line(&mut out, format_args!("fdatasync of 512 bytes here: p50 {p50:.0} us, p99 {p99:.0} us, {rate:.0}/s\n"));
    let head =
        "durable writes/s       fdatasync  ours, in a router           ours, over gRPC             etcd, over gRPC";
    line(&mut out, format_args!("{head}"));
    for writes in &results.writes {
        let WriteResults { nodes, clients, fdatasync, embedded, ours, etcd } = writes;
        let show = |of: &LoadStats| format!("{:>7.0} ({:>6.0}/{:>7.0} us)", of.rate, of.p50, of.p99);
        let of = if *nodes == 1 { "node " } else { "nodes" };
        line(
            &mut out,
            format_args!(
                "{nodes} {of} {clients:>4} clients  {:>5.0} us  {}  {}  {}",
                fdatasync.p50,
                show(embedded),
                show(ours),
                show(etcd)
            ),
        );
    }
    line(
        &mut out,
        format_args!(
            "(in brackets p50/p99. A router writes from inside its process; over gRPC both are asked by the same client.)\n"
        ),
    );
    for writes in &results.writes {
        write_goals(&mut out, writes);
    }
    if let Some(scale) = &results.scale {
        scale_goals(&mut out, scale);
    }
    out
}

fn write_goals(out: &mut String, writes: &WriteResults) {
    let WriteResults { nodes, clients, fdatasync, embedded, ours, etcd } = writes;
    if *clients == 1 && *nodes == 1 {
        goal_line(out, "1 client, p50 over fdatasync's", embedded.p50 / fdatasync.p50, PerformanceGoal::AtMost(1.3));
    }
    if *clients >= 64 {
        let what = |how: &str| format!("{clients} clients, {nodes} node(s), {how} over etcd");
        goal_line(out, &what("in a router"), embedded.rate / etcd.rate, PerformanceGoal::AtLeast(3.0));
        goal_line(out, &what("by gRPC"), ours.rate / etcd.rate, PerformanceGoal::AtLeast(3.0));
    }
}

fn scale_goals(out: &mut String, scale: &ScaleResults) {
    let ScaleResults { artifacts, snapshot_seconds, snapshot_bytes, longest_ms, kept_off_ms, writes, lookups, .. } =
        scale;
    line(
        out,
        format_args!(
            "{artifacts} artifacts: snapshot {snapshot_seconds:.1} s, {} MB; {:.0} writes/s and {:.0} lookups/s meanwhile",
            snapshot_bytes >> 20,
            writes.rate,
            lookups.rate
        ),
    );
    goal_line(out, "bytes an artifact", scale.bytes_an_artifact, PerformanceGoal::AtMost(400.0));
    line(out, format_args!("          (with what any ledger takes, the log's cache of up to 64 MiB among it)"));
    goal_line(out, "lookup p50, us", lookups.p50, PerformanceGoal::AtMost(1.0));
    line(out, format_args!("          lookup p99, us {:>46.2}", lookups.p99));
    goal_line(out, "longest lookup without waits for a core, ms", scale.stall_ms, PerformanceGoal::AtMost(10.0));
    line(
        out,
        format_args!("          (with them {longest_ms:.1} ms; the longest wait for a core was {kept_off_ms:.1} ms)"),
    );
    goal_line(out, "memory in a snapshot over before", scale.peak, PerformanceGoal::AtMost(1.3));
}

enum PerformanceGoal {
    AtLeast(f64),
    AtMost(f64),
}

fn goal_line(out: &mut String, what: &str, found: f64, aim: PerformanceGoal) {
    let (is_met, sign, bound) = match aim {
        PerformanceGoal::AtLeast(bound) => (found >= bound, ">=", bound),
        PerformanceGoal::AtMost(bound) => (found <= bound, "<=", bound),
    };
    let word = if is_met { "PASS " } else { "short" };
    line(out, format_args!("{word}     {what:<48} {found:>12.2}   aim {sign} {bound}"));
}

fn line(out: &mut String, text: std::fmt::Arguments<'_>) {
    writeln!(out, "{text}").expect("a string takes everything");
}
