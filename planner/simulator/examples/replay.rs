//! Measures the simulated steps per second:
//! `cargo run --release -p simulator --example replay -- TRACE.jsonl.gz LOAD POLICY...`.

use std::io::{Read, Write};
use std::time::Instant;

use flate2::read::MultiGzDecoder;
use simulator::policies::PolicyKind;
use simulator::trace::{ReplayLimits, TraceLoader};
use simulator::{HardwareProfile, Simulation, SimulationSetup};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().ok_or("which trace?")?;
    let load: f64 = arguments.next().ok_or("how much load?")?.parse()?;
    let mut text = String::new();
    MultiGzDecoder::new(std::fs::File::open(&path)?).read_to_string(&mut text)?;
    let mut reader = TraceLoader::default();
    reader.read(&path, &text)?;
    let trace = reader.finish()?.ok_or("an empty trace")?.apply_limits(&ReplayLimits::default());
    let setup = SimulationSetup { workers: 8, spec: HardwareProfile::H100_8B, load, seed: 1 };
    let mut out = std::io::stdout();
    for policy in arguments {
        let kind: PolicyKind = policy.parse()?;
        let begin = Instant::now();
        let figures = Simulation::new(&trace, kind, setup)?.run(&mut |_, _| {});
        let seconds = begin.elapsed().as_secs_f64();
        writeln!(out, "{} {:.0} steps/s", figures.policy, figures.steps as f64 / seconds)?;
    }
    Ok(())
}
