//! No import circle of more than five files.

use tests::rules::{Crates, ImportGraph, SourceFile, sources};

/// Most files that may form a circle.
const MAX_CIRCLE: usize = 5;

#[test]
fn no_import_circle_has_more_than_five_files() {
    let (crates, sources) = (Crates::read().unwrap(), sources().unwrap());
    let mut wrong = Vec::new();
    for (name, roots) in &crates.targets {
        let graph = ImportGraph::read(roots, &sources).unwrap();
        assert!(graph.files() > 1, "only {} files of {name} were read", graph.files());
        let circles = graph.circles();
        let larger = circles.iter().filter(|circle| circle.len() > MAX_CIRCLE);
        wrong.extend(larger.map(|circle| describe(name, &graph, circle)));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn describe(name: &str, graph: &ImportGraph, circle: &[String]) -> String {
    let cycle: Vec<String> = graph.shortest_cycle(circle).iter().map(ToString::to_string).collect();
    format!(
        "{name}: {} files form an import circle:\n  {}\na shortest cycle:\n  {}",
        circle.len(),
        circle.join("\n  "),
        cycle.join("\n  ")
    )
}

/// Reads a crate of these files; the first one is the root.
fn graph(files: &[(&str, &str)]) -> ImportGraph {
    let source = |(path, text): &(&str, &str)| SourceFile { path: (*path).into(), text: (*text).into() };
    let sources: Vec<SourceFile> = files.iter().map(source).collect();
    ImportGraph::read(&[files[0].0.into()], &sources).unwrap()
}

/// Returns the arrows of a crate that has modules `a` and `b`, without folder and ending.
fn arrows(root: &str, a: &str, b: &str) -> Vec<String> {
    let graph = graph(&[("x/src/lib.rs", root), ("x/src/a.rs", a), ("x/src/b.rs", b)]);
    let all = ["x/src/a.rs", "x/src/b.rs", "x/src/lib.rs"].map(str::to_owned);
    let short = |path: &str| path.trim_start_matches("x/src/").trim_end_matches(".rs").to_owned();
    graph.arrows_within(&all).iter().map(|arrow| format!("{} -> {}", short(&arrow.from), short(&arrow.to))).collect()
}

const A_AND_B: &str = "mod a; mod b;";

#[test]
fn each_form_of_a_path_is_an_arrow() {
    for a in [
        "use crate::b::Thing;",
        "use super::b::{Thing, other};",
        "use super::b::Thing as Renamed;",
        "use crate::b; fn f() -> b::Thing { b::other() }",
        "fn f() { crate::b::other(); }",
        "fn f() { use super::b::other; other(); }",
        "fn f() { assert!(super::b::other(1)); }",
        "struct Own { #[serde(with = \"super::b\")] field: u64 }",
        "#[derive(SmartDefault)] struct Own { #[default(crate::b::Thing::new())] field: u64 }",
        "mod inner { use super::super::b::Thing; }",
        "use super::b::*; struct Own(Thing);",
        "impl crate::b::Seen for Own {}",
    ] {
        assert_eq!(arrows(A_AND_B, a, "pub struct Thing; pub trait Seen {} pub fn other() {}"), ["a -> b"], "{a}");
    }
}

#[test]
fn a_path_that_leads_out_of_the_crate_or_to_tests_is_no_arrow() {
    for a in [
        "use std::b::Thing; use other::Thing;",
        "use ::b::Thing;",
        "pub(in crate::b) fn f() {}",
        "#[cfg(test)] use crate::b::Thing;",
        "#[cfg(test)] mod tests { use crate::b::Thing; }",
        "struct Own; impl Own { #[cfg(test)] fn f() { crate::b::other(); } }",
        "fn f(b: u64) -> u64 { b }",
        "use crate::b;",
    ] {
        assert_eq!(arrows(A_AND_B, a, "pub struct Thing; pub fn other() {}"), Vec::<String>::new(), "{a}");
    }
}

#[test]
fn a_reexport_is_followed_to_the_file_that_defines_the_item() {
    let b = "pub struct Thing;";
    assert_eq!(arrows("mod a; mod b; pub use b::Thing;", "use crate::Thing;", b), ["a -> b"]);
    assert_eq!(arrows("mod a; mod b; pub use b::Thing as Other;", "fn f(_: crate::Other) {}", b), ["a -> b"]);
    assert_eq!(arrows("mod a; mod b; pub use b::*;", "use super::Thing;", b), ["a -> b"]);
    assert_eq!(arrows("mod a; mod b; pub use b::Thing; fn f(_: Thing) {}", "", b), ["lib -> b"], "a use by the root");
}

#[test]
fn names_of_functions_modules_and_macros_are_told_apart() {
    // `plan` is a function of `b` and a module.
    let root = "mod a; mod b; mod plan { pub struct Plan; } pub use b::plan; pub use plan::Plan;";
    assert_eq!(arrows(root, "use crate::Plan;", "pub fn plan() {}"), ["a -> lib"]);
    assert_eq!(arrows(root, "fn f() { crate::plan(); }", "pub fn plan() {}"), ["a -> b"]);
    let exported = "#[macro_export] macro_rules! ensure { () => {} }";
    assert_eq!(arrows(A_AND_B, "use crate::ensure; fn f() { ensure!() }", exported), ["a -> b"]);
    let in_root = "macro_rules! ensure { () => {} } mod a; mod b;";
    assert_eq!(arrows(in_root, "fn f() { ensure!() }", ""), ["a -> lib"]);
    assert_eq!(arrows(A_AND_B, "use b::b; fn f() { b() }", ""), Vec::<String>::new());
}

#[test]
fn a_planted_circle_is_found_with_its_shortest_cycle() {
    let files = [
        ("x/src/lib.rs", "mod a; mod b; mod leaf; pub use b::inner::Inner;"),
        ("x/src/a.rs", "use crate::Inner; use crate::leaf::Leaf; pub struct A;"),
        ("x/src/b.rs", "pub mod inner; mod side; use crate::a::A; use side::Side; pub struct B;"),
        ("x/src/b/inner.rs", "use super::B; pub struct Inner;"),
        ("x/src/b/side.rs", "use super::B; use crate::leaf::Leaf; pub struct Side;"),
        ("x/src/leaf.rs", "pub struct Leaf;"),
    ];
    let graph = graph(&files);
    assert_eq!(graph.files(), 6);
    let circle = ["x/src/a.rs", "x/src/b.rs", "x/src/b/inner.rs", "x/src/b/side.rs"].map(str::to_owned);
    assert_eq!(graph.circles(), [circle.to_vec()]);
    let cycle: Vec<String> = graph.shortest_cycle(&circle).iter().map(ToString::to_string).collect();
    assert_eq!(cycle, ["x/src/b.rs -> x/src/b/side.rs (side::Side)", "x/src/b/side.rs -> x/src/b.rs (super::B)"]);
    let told = describe("x", &graph, &circle);
    assert!(told.starts_with("x: 4 files form an import circle:\n  x/src/a.rs\n"), "{told}");
}

#[test]
fn a_chain_without_a_way_back_is_no_circle() {
    let graph = graph(&[
        ("x/src/main.rs", "mod a; mod b; mod tests; fn main() { a::f() }"),
        ("x/src/a.rs", "pub fn f() { crate::b::g() }"),
        ("x/src/b.rs", "pub fn g() {}"),
        ("x/src/tests.rs", "use crate::a::f; use crate::main;"),
    ]);
    assert_eq!((graph.files(), graph.circles()), (3, Vec::new()));
}

#[test]
fn a_missing_file_is_an_error() {
    let source = SourceFile { path: "x/src/lib.rs".into(), text: "mod missing;".into() };
    let error = ImportGraph::read(&["x/src/lib.rs".into()], &[source]).err().unwrap();
    assert_eq!(error.to_string(), "x/src/missing.rs: no such source file");
}
