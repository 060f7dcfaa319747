//! Compares every step of whole trace folders (written by `testdata/make_goldens.py --traces`) with `transformers`.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a report on the terminal is what this program is for")]

#[path = "../tests/goldens/recorded.rs"]
mod recorded;

use std::path::PathBuf;
use std::process::ExitCode;

/// Maximum number of differences printed per trace; all are counted.
const MAX_SHOWN: usize = 10;

fn main() -> ExitCode {
    let Some(folder) = std::env::args().nth(1).map(PathBuf::from) else {
        eprintln!("usage: check_traces FOLDER, as written by make_goldens.py --traces DIR --out FOLDER");
        return ExitCode::from(2);
    };
    let files = std::fs::read_dir(&folder).expect("the folder can be listed");
    let names =
        files.filter_map(|file| file.ok()?.file_name().to_str()?.strip_suffix(".goldens.json").map(str::to_owned));
    let mut names: Vec<String> = names.collect();
    names.sort();
    let mut all = recorded::CheckReport::default();
    for name in &names {
        let (sessions, goldens) = (format!("{name}.sessions.json.gz"), format!("{name}.goldens.json"));
        for (model, checked) in recorded::check(&folder.join(sessions), &folder.join(goldens)) {
            report(&format!("{name} {model}"), &checked);
            all += checked;
        }
    }
    report("all", &all);
    match all.steps > 0 && all.differences.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}

fn report(name: &str, checked: &recorded::CheckReport) {
    let recorded::CheckReport { steps, refused, tokens, reused: known, extended: grown, too_large, differences } =
        checked;
    println!(
        "{name}: {steps} steps, {tokens} tokens ({known} from checkpoints), {} steps grown ({} tokens known), \
         {refused} refused by the template, {too_large} over a bound, {} differences",
        grown.0,
        grown.1,
        differences.len()
    );
    differences.iter().take(MAX_SHOWN).for_each(|difference| println!("  {difference}"));
}
