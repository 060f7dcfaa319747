//! What was found, line by line, with the aim of each.

use std::fmt::Write;

use serde::Serialize;

use crate::load::Measured;
use crate::scale::Scale;

/// Writes with so many clients.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
pub(crate) struct Writes {
    pub(crate) nodes: usize,
    pub(crate) clients: u64,
    /// The disk's own, between these runs.
    pub(crate) fdatasync: Measured,
    /// From inside a router's process.
    pub(crate) embedded: Measured,
    /// Over gRPC, as etcd is asked.
    pub(crate) ours: Measured,
    pub(crate) etcd: Measured,
}

/// All of it.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub(crate) struct Results {
    pub(crate) fdatasync: Measured,
    pub(crate) writes: Vec<Writes>,
    pub(crate) scale: Option<Scale>,
}

/// As a table.
pub(crate) fn table(results: &Results) -> String {
    let mut out = String::new();
    let Measured { rate, p50, p99 } = results.fdatasync;
    line(&mut out, format_args!("fdatasync of 512 bytes here: p50 {p50:.0} us, p99 {p99:.0} us, {rate:.0}/s\n"));
    let head =
        "durable writes/s       fdatasync  ours, in a router           ours, over gRPC             etcd, over gRPC";
    line(&mut out, format_args!("{head}"));
    for writes in &results.writes {
        let Writes { nodes, clients, fdatasync, embedded, ours, etcd } = writes;
        let show = |of: &Measured| format!("{:>7.0} ({:>6.0}/{:>7.0} us)", of.rate, of.p50, of.p99);
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
        aims_of_writes(&mut out, writes);
    }
    if let Some(scale) = &results.scale {
        aims_of_scale(&mut out, scale);
    }
    out
}

fn aims_of_writes(out: &mut String, writes: &Writes) {
    let Writes { nodes, clients, fdatasync, embedded, ours, etcd } = writes;
    if *clients == 1 && *nodes == 1 {
        aim(out, "1 client, p50 over fdatasync's", embedded.p50 / fdatasync.p50, Aim::AtMost(1.3));
    }
    if *clients >= 64 {
        let what = |how: &str| format!("{clients} clients, {nodes} node(s), {how} over etcd");
        aim(out, &what("in a router"), embedded.rate / etcd.rate, Aim::AtLeast(3.0));
        aim(out, &what("by gRPC"), ours.rate / etcd.rate, Aim::AtLeast(3.0));
    }
}

fn aims_of_scale(out: &mut String, scale: &Scale) {
    let Scale { artifacts, snapshot_seconds, snapshot_bytes, longest_ms, kept_off_ms, writes, lookups, .. } = scale;
    line(
        out,
        format_args!(
            "{artifacts} artifacts: snapshot {snapshot_seconds:.1} s, {} MB; {:.0} writes/s and {:.0} lookups/s meanwhile",
            snapshot_bytes >> 20,
            writes.rate,
            lookups.rate
        ),
    );
    aim(out, "bytes an artifact", scale.bytes_an_artifact, Aim::AtMost(400.0));
    line(out, format_args!("          (with what any ledger takes, the log's cache of up to 64 MiB among it)"));
    aim(out, "lookup p50, us", lookups.p50, Aim::AtMost(1.0));
    line(out, format_args!("          lookup p99, us {:>46.2}", lookups.p99));
    aim(out, "longest lookup without waits for a core, ms", scale.stall_ms, Aim::AtMost(10.0));
    line(
        out,
        format_args!("          (with them {longest_ms:.1} ms; the longest wait for a core was {kept_off_ms:.1} ms)"),
    );
    aim(out, "memory in a snapshot over before", scale.peak, Aim::AtMost(1.3));
}

enum Aim {
    AtLeast(f64),
    AtMost(f64),
}

fn aim(out: &mut String, what: &str, found: f64, aim: Aim) {
    let (is_met, sign, bound) = match aim {
        Aim::AtLeast(bound) => (found >= bound, ">=", bound),
        Aim::AtMost(bound) => (found <= bound, "<=", bound),
    };
    let word = if is_met { "PASS " } else { "short" };
    line(out, format_args!("{word}     {what:<48} {found:>12.2}   aim {sign} {bound}"));
}

fn line(out: &mut String, text: std::fmt::Arguments<'_>) {
    writeln!(out, "{text}").expect("a string takes everything");
}
