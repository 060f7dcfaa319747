use std::path::PathBuf;

use super::*;

fn committed_folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/src/reference")
}

#[test]
fn committed_reference_pages_equal_the_generated_ones() {
    let committed =
        |page: &ReferencePage| std::fs::read_to_string(committed_folder().join(page.file)).unwrap_or_default();
    let pages = pages(crate::cli::command());
    let outdated: Vec<&str> = pages.iter().filter(|page| committed(page) != page.text).map(|page| page.file).collect();
    assert_eq!(outdated, Vec::<&str>::new(), "run `just reference` and commit docs/src/reference");
}

#[test]
fn every_page_lists_what_the_code_defines() {
    let [settings, metrics, api, commands] = pages(crate::cli::command());
    for family in Metrics::default().families() {
        assert!(metrics.text.contains(&format!("| `{}` | {} |", family.name, family.kind)), "{}", family.name);
    }
    for path in openapi_document()["paths"].as_object().unwrap().keys() {
        assert!(api.text.contains(&format!(" {path}`\n")), "{path}");
    }
    let lists =
        |page: &ReferencePage, wanted: usize| page.text.lines().filter(|line| line.starts_with("| ")).count() > wanted;
    assert!(lists(&settings, 100) && lists(&commands, 100), "settings and commands have tables");
    assert!(!commands.text.contains("ownerserve reference"), "hidden commands are left out");
}

#[test]
fn pages_are_written_under_their_names() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), crate::cli::command()).unwrap();
    for page in pages(crate::cli::command()) {
        assert_eq!(std::fs::read_to_string(folder.path().join(page.file)).unwrap(), page.text);
    }
}
