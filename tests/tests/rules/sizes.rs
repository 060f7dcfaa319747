//! Rules of STYLE.md that hold everywhere, and the test ratio of pure crates.

use tests::rules::{measure, sources};

/// Minimum test lines per hundred source lines of each pure crate. The goal is 120; these only rise.
const MIN_TEST_RATIO: [(&str, usize); 7] = [
    ("ownership/vocabulary/", 18),
    ("ownership/ledger/", 50),
    ("planner/", 75),
    ("planner/simulator/", 32),
    ("workers-shim/residency/", 55),
    ("workers-shim/engine-model/", 75),
    ("router/prefix/", 50),
];

#[test]
fn no_function_takes_two_bools_no_error_is_a_string_no_name_is_vague() {
    let mut offences = Vec::new();
    for source in sources().unwrap() {
        let found = measure(&source).unwrap();
        offences.extend(
            found.multi_bool_functions.into_iter().map(|name| format!("{}: {name} takes two bools", source.path)),
        );
        offences.extend(found.vague_names.into_iter().map(|name| format!("{}: {name} is a vague name", source.path)));
        if found.string_errors > 0 {
            offences.push(format!("{}: {} results with a String for an error", source.path, found.string_errors));
        }
    }
    assert_eq!(offences, Vec::<String>::new());
}

#[test]
fn pure_crates_reach_their_test_line_ratio() {
    let mut short = Vec::new();
    for (room, floor) in MIN_TEST_RATIO {
        let (mut lines, mut test_lines) = (0, 0);
        for source in sources().unwrap().iter().filter(|source| crate_of(&source.path) == Some(room)) {
            let measures = measure(source).unwrap();
            lines += measures.lines;
            test_lines += measures.test_lines;
        }
        if test_lines * 100 < lines * floor {
            short.push(format!("{room}: {test_lines} lines of test for {lines}, below {floor} %"));
        }
    }
    assert_eq!(short, Vec::<String>::new());
}

/// A crate nested in another crate's folder counts separately.
fn crate_of(path: &str) -> Option<&'static str> {
    let around = MIN_TEST_RATIO.into_iter().map(|(room, _)| room).filter(|room| path.starts_with(room));
    around.max_by_key(|room| room.len())
}
