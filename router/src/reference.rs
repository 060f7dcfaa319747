//! Reference pages of the book, generated from the code: settings, metrics, operator API, command line.
//!
//! No page names a setting, metric, path or command by hand: whatever is renamed, added or removed in the code changes
//! the pages with the next `just reference`.

mod api;
mod command_line;
mod example_config;
mod markdown;
mod metrics;
mod setting_schema;
mod settings;

use std::path::Path;

use crate::operator::openapi_document;
use proxy::telemetry::metrics::Metrics;

/// One generated page.
#[derive(Debug)]
pub(crate) struct ReferencePage {
    file: &'static str,
    text: String,
}

/// Returns all pages; `command` is the definition of the whole command line.
pub(crate) fn pages(command: clap::Command) -> [ReferencePage; 4] {
    [
        ReferencePage { file: "settings.md", text: settings::page() },
        ReferencePage { file: "metrics.md", text: metrics::page(Metrics::default().families()) },
        ReferencePage { file: "api.md", text: api::page(&openapi_document()) },
        ReferencePage { file: "command-line.md", text: command_line::page(command) },
    ]
}

/// Writes all pages into `folder`, which must exist.
pub(crate) fn write(folder: &Path, command: clap::Command) -> std::io::Result<()> {
    pages(command).into_iter().try_for_each(|page| std::fs::write(folder.join(page.file), page.text))
}

#[cfg(test)]
mod tests;
