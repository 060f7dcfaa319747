//! STYLE.md's measures. What is above them stands in `tests/ratchet.toml` and may only shrink.

use tests::rules::{Goal, Offence, Ratchet, measure, offenders, sources};

/// Lines of test per hundred lines of source that each pure crate has at least. The goal is 120; these only rise.
const PURE: [(&str, usize); 7] = [
    ("ownership/vocabulary/", 18),
    ("ownership/ledger/", 50),
    ("planner/", 75),
    ("planner/simulator/", 32),
    ("workers-shim/residency/", 55),
    ("workers-shim/engine-model/", 75),
    ("router/prefix/", 50),
];

#[test]
fn nothing_new_is_above_a_measure_and_nothing_that_was_has_grown() {
    let found = offenders().unwrap();
    let broken = Ratchet::read().unwrap();
    let broken = broken.broken_by(&found);
    assert!(broken.is_empty(), "above the measures of STYLE.md (`just ratchet` records them): {broken:#?}");
}

#[test]
fn the_ratchet_lists_nothing_that_has_shrunk_or_gone() {
    let committed = Ratchet::read().unwrap();
    let tightened = committed.tightened(&offenders().unwrap());
    assert_eq!(committed, tightened, "`just fix` lowers them");
}

#[test]
fn pure_crates_carry_the_tests_they_did() {
    let mut short = Vec::new();
    for (room, floor) in PURE {
        let (mut lines, mut test_lines) = (0, 0);
        for source in sources().unwrap().iter().filter(|source| room_of(&source.path) == Some(room)) {
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

/// A crate within another one's folder is a room of its own.
fn room_of(path: &str) -> Option<&'static str> {
    let around = PURE.into_iter().map(|(room, _)| room).filter(|room| path.starts_with(room));
    around.max_by_key(|room| room.len())
}

#[test]
fn a_ratchet_refuses_growth_and_newcomers_and_never_loosens() {
    let offence = |place: &str, size| Offence { goal: Goal::FunctionLines, place: place.into(), size };
    let ratchet = Ratchet::of(&[offence("a", 80), offence("b", 90)]);
    let now = [offence("a", 81), offence("b", 70), offence("c", 61)];
    let broken: Vec<&str> = ratchet.broken_by(&now).into_iter().map(|offence| offence.place.as_str()).collect();
    assert_eq!(broken, ["a", "c"]);
    assert_eq!(ratchet.tightened(&now), Ratchet::of(&[offence("a", 80), offence("b", 70)]));
}
