//! Prints the results as a table.

use std::fmt::Write;
use std::io::Write as _;

use crate::measure::{ProxyBenchResults, RequestCost};
use crate::streams::PacedStreamCost;

/// Formats the table; each ratio is next to the value it refers to.
pub(crate) fn table(results: &ProxyBenchResults) -> String {
    let mut out = String::from(
        "\nFirst byte at 1 client, CPU and throughput at 16 clients; medians.\n\n\
         body     target               first byte   of direct     added   of haproxy's   CPU/request   of haproxy's   of direct's req/s\n",
    );
    for cost in &results.costs {
        line(&mut out, cost, results);
    }
    out.push_str("\nA streamed answer, 8 events 2 ms apart, ordinary keep-alive connection:\n\n");
    for stream in &results.streams {
        let _ = writeln!(
            out,
            "         {:<20} {:>9.1} ms   {:>+7.2} ms",
            stream.target,
            stream.whole_us / 1e3,
            stream.added_us / 1e3
        );
    }
    if !results.paced.is_empty() {
        out.push_str(
            "\nStreams of 50 events 20 ms apart; memory is what each of 1,000 idle ones adds:\n\n\
             streams  target               answers/s    of direct's   CPU/answer   of haproxy's   errors   memory\n",
        );
        results.paced.iter().for_each(|cost| paced_line(&mut out, cost, results));
    }
    out
}

fn paced_line(out: &mut String, cost: &PacedStreamCost, results: &ProxyBenchResults) {
    let beside =
        |target: &str| results.paced.iter().find(|other| other.streams == cost.streams && other.target == target);
    let of_direct = beside("direct").map_or(String::new(), |direct| times(cost.per_second / direct.per_second));
    let reference = beside("haproxy").and_then(|haproxy| haproxy.cpu_us);
    let _ = writeln!(
        out,
        "{:>7}  {:<20} {:>9.0} {:>14} {:>12} {:>14} {:>8} {:>8}",
        cost.streams,
        cost.target,
        cost.per_second,
        of_direct,
        cost.cpu_us.map_or(String::new(), |cpu| format!("{cpu:.0} us")),
        cost.cpu_us.zip(reference).map_or(String::new(), |(own, other)| times(own / other)),
        cost.errors,
        cost.idle_bytes.map_or(String::new(), |bytes| format!("{:.1} KB", bytes / 1e3)),
    );
}

/// Says what is measured now.
pub(crate) fn progress(step: &str) {
    // Nobody reads it if stderr is gone.
    let _ = writeln!(std::io::stderr(), "bench: {step}");
}

fn line(out: &mut String, cost: &RequestCost, results: &ProxyBenchResults) {
    let beside = |target: &str| results.costs.iter().find(|other| other.size == cost.size && other.target == target);
    let (Some(direct), Some(haproxy)) = (beside("direct"), beside("haproxy")) else { return };
    let proxied = cost.target != "direct";
    let added = if proxied { format!("{:.0} us", cost.added_us) } else { String::new() };
    let added_ratio = if proxied { times(cost.added_us / haproxy.added_us) } else { String::new() };
    let cpu = cost.cpu_us.map_or(String::new(), |cpu| format!("{cpu:.0} us"));
    let cpu_ratio = cost.cpu_us.zip(haproxy.cpu_us).map_or(String::new(), |(own, other)| times(own / other));
    // Writing to a string cannot fail.
    let _ = writeln!(
        out,
        "{:>4} KB  {:<20} {:>7.0} us {:>11} {:>9} {:>14} {:>13} {:>14} {:>19}",
        cost.size >> 10,
        cost.target,
        cost.first_byte_us,
        times(cost.first_byte_us / direct.first_byte_us),
        added,
        added_ratio,
        cpu,
        cpu_ratio,
        times(cost.per_second / direct.per_second),
    );
}

fn times(ratio: f64) -> String {
    format!("{ratio:.2}x")
}
