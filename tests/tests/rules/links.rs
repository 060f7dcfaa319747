//! Links of the documents lead somewhere, and the book holds every page.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

use tests::rules::{root, tracked};

const BOOK: &str = "docs/src/";
const SUMMARY: &str = "docs/src/SUMMARY.md";
/// Documents at the root whose links are checked.
const ROOT_DOCUMENTS: [&str; 5] = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "STYLE.md"];

/// A link of a document.
#[derive(PartialEq, Debug)]
struct DocumentLink {
    line: usize,
    target: String,
}

fn documents() -> Vec<String> {
    let mut paths = tracked().unwrap();
    paths.retain(|path| {
        path.ends_with(".md")
            && (path.starts_with(BOOK) || is_decision(path) || ROOT_DOCUMENTS.contains(&path.as_str()))
    });
    paths
}

fn is_decision(path: &str) -> bool {
    path.contains("/decisions/") && !path.starts_with(BOOK)
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Returns the lines with their numbers, without code blocks.
fn prose_lines(text: &str) -> Vec<(usize, &str)> {
    let (mut lines, mut is_fenced, mut was_blank, mut is_indented) = (Vec::new(), false, true, false);
    for (at, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            is_fenced = !is_fenced;
            continue;
        }
        // Four spaces begin a code block only behind a blank line; elsewhere they continue a paragraph or an item.
        is_indented = line.starts_with("    ") && (was_blank || is_indented);
        was_blank = line.trim().is_empty();
        if !is_fenced && !is_indented {
            lines.push((at + 1, line));
        }
    }
    lines
}

/// Returns `line` with spaces in place of code spans.
fn without_code(line: &str) -> String {
    let parts = line.split('`').enumerate();
    parts.map(|(index, part)| if index % 2 == 1 { " ".repeat(part.len() + 2) } else { part.to_owned() }).collect()
}

fn links(text: &str) -> Vec<DocumentLink> {
    let mut links = Vec::new();
    for (line, content) in prose_lines(text) {
        for rest in without_code(content).split("](").skip(1) {
            let target = rest.split([')', ' ']).next().unwrap_or_default().to_owned();
            links.push(DocumentLink { line, target });
        }
    }
    links
}

/// Returns the anchors of all headings, by the rule of mdBook: lower case, letters, digits, `_` and `-`, a `-` for each
/// space, and a number at the end of one that was there before.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut anchors = BTreeSet::new();
    for (_, line) in prose_lines(text) {
        let title = line.trim_start_matches('#');
        if title.len() == line.len() || !title.starts_with(' ') {
            continue;
        }
        // Attributes in braces at the end may name the anchor.
        let (title, attributes) = match title.trim().strip_suffix('}').and_then(|rest| rest.rsplit_once('{')) {
            Some((title, attributes)) => (title, attributes),
            None => (title, ""),
        };
        if let Some(name) = attributes.split_whitespace().find_map(|attribute| attribute.strip_prefix('#')) {
            anchors.insert(name.to_owned());
            continue;
        }
        let shown = shown_text(title.trim()).to_lowercase();
        let kept = shown.chars().filter(|c| c.is_alphanumeric() || c.is_whitespace() || matches!(c, '_' | '-'));
        let anchor: String = kept.map(|c| if c.is_whitespace() { '-' } else { c }).collect();
        let numbered = (1..).map(|number| format!("{anchor}-{number}"));
        let free = std::iter::once(anchor.clone()).chain(numbered).find(|anchor| !anchors.contains(anchor));
        anchors.extend(free);
    }
    anchors
}

/// Returns a heading's text without the targets of its links.
fn shown_text(title: &str) -> String {
    let mut parts = title.split("](");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |shown, rest| shown + rest.split_once(')').map_or("", |(_, behind)| behind))
}

/// Resolves `..` in the text of a path: a link in the book is resolved by a browser, which knows no symbolic links.
fn normalized(path: &Path) -> PathBuf {
    let mut parts = Vec::new();
    for part in path.components() {
        match part {
            Component::ParentDir if !parts.is_empty() => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.into_iter().collect()
}

/// Returns what is wrong with a link of the document at `path`.
fn problem(path: &str, link: &DocumentLink) -> Option<&'static str> {
    let (file, anchor) =
        link.target.split_once('#').map_or((link.target.as_str(), None), |(file, it)| (file, Some(it)));
    if file.contains("://") || file.starts_with("mailto:") {
        return None;
    }
    let folder = Path::new(path).parent().expect("a file is in a folder");
    let target = if file.is_empty() { PathBuf::from(path) } else { normalized(&folder.join(file)) };
    // A decision is a page of the book, too, where only the other decisions of its folder are beside it.
    let reachable = if is_decision(path) { folder } else { Path::new(BOOK) };
    if (path.starts_with(BOOK) || is_decision(path)) && !target.starts_with(reachable) {
        return Some("leads out of the book, where the built pages have no file");
    }
    if !root().join(&target).exists() {
        return Some("leads to no file");
    }
    let anchor = anchor?;
    let is_known =
        target.extension().is_some_and(|end| end == "md") && anchors(&read(&target.to_string_lossy())).contains(anchor);
    (!is_known).then_some("leads to no heading of that page")
}

#[test]
fn every_relative_link_leads_to_a_file_and_heading() {
    let documents = documents();
    assert!(documents.len() > 50, "only {} documents were found", documents.len());
    let (mut count, mut broken) = (0, Vec::new());
    for path in &documents {
        for link in links(&read(path)) {
            count += 1;
            let problem = problem(path, &link);
            broken.extend(problem.map(|problem| format!("{path}:{}: {} {problem}", link.line, link.target)));
        }
    }
    assert!(count > 200, "only {count} links were found");
    assert_eq!(broken, Vec::<String>::new());
}

#[test]
fn every_page_and_decision_is_in_the_summary() {
    let book = root().join(BOOK);
    let listed: BTreeSet<PathBuf> =
        links(&read(SUMMARY)).iter().map(|link| book.join(&link.target).canonicalize().unwrap()).collect();
    let pages = documents()
        .into_iter()
        .filter(|path| path.as_str() != SUMMARY && (path.starts_with(BOOK) || is_decision(path)));
    let absent: Vec<String> =
        pages.filter(|path| !listed.contains(&root().join(path).canonicalize().unwrap())).collect();
    assert_eq!(absent, Vec::<String>::new());
}

#[test]
fn readme_is_short() {
    let text = read("README.md");
    assert!(text.lines().count() <= 150, "README.md has {} lines; at most 150 are read", text.lines().count());
    let mut lengths: BTreeMap<usize, usize> = BTreeMap::new();
    let mut begin = 0;
    for (line, content) in prose_lines(&text) {
        let is_paragraph = !content.trim().is_empty() && !content.starts_with(['|', '#', '-', ' ']);
        if !is_paragraph {
            begin = line;
            continue;
        }
        *lengths.entry(begin + 1).or_default() += 1;
    }
    let long: Vec<_> = lengths.into_iter().filter(|(_, lines)| *lines > 5).collect();
    assert_eq!(long, Vec::new(), "line and length of paragraphs with more than five lines");
}

#[test]
fn links_and_anchors_are_read_as_the_book_reads_them() {
    let text = "# A title: `x_y`, Z\n[one](a.md) `[two](b.md)` and [three](c/d.md#e)\n\n    [four](f.md)\n\n```\n[five](g.md)\n```\n\
                ## Same\n### Same\n## With [a link](h.md)\n## Named {#own}\n- item\n    [six](i.md)\n";
    let targets: Vec<String> = links(text).into_iter().map(|link| link.target).collect();
    assert_eq!(targets, ["a.md", "c/d.md#e", "h.md", "i.md"]);
    let expected = ["a-title-x_y-z", "own", "same", "same-1", "with-a-link"];
    assert_eq!(anchors(text), expected.map(str::to_owned).into());
}
