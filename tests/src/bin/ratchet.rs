//! Writes `tests/ratchet.toml`: `tighten` lowers what has shrunk, `accept` records everything as it is. The only rule code that writes.

use std::process::ExitCode;

use tests::rules::{Ratchet, Unreadable, offenders};

fn main() -> ExitCode {
    let argument = std::env::args().nth(1);
    let done = match argument.as_deref() {
        Some("tighten") => tighten(),
        Some("accept") => offenders().and_then(|found| Ratchet::of(&found).write()),
        _ => Err(Unreadable::Form { what: "usage".into(), why: "ratchet tighten|accept".into() }),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report(&error);
            ExitCode::FAILURE
        }
    }
}

fn tighten() -> Result<(), Unreadable> {
    Ratchet::read()?.tightened(&offenders()?).write()
}

fn report(error: &Unreadable) {
    use std::io::Write;
    // Nothing is left to do when standard error is gone too.
    let _ = writeln!(std::io::stderr(), "{error}");
}
