//! File discovery: workers from a file of their own, reloaded when it changes. A file that cannot be used changes
//! nothing.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;

use super::{WorkerDiscovery, WorkerSource};
use crate::discovery::{WorkerConfig, workers_problem};
use crate::renamed_keys;
use crate::toml_errors::{describe_toml_error, without_text};
use crate::watched_files::{FileStamp, ReloadReporter, follow, stamp_of};

/// Time between two checks of the file.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Largest file: a thousand workers with long lists of models.
const MAX_BYTES: u64 = 4 << 20;

/// A worker file that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error(
    "discovery.workers_file {}: {problem}; accepted is [[workers]] as in the configuration, or in a file that ends in .json \
     {{\"workers\": [...]}}; a list of none is workers = []", .path.display()
)]
pub struct WorkerFileError {
    path: PathBuf,
    problem: String,
}

/// The worker file, as it was last read.
#[derive(Clone)]
pub struct WorkerFileWatcher {
    path: PathBuf,
    stamp: Option<FileStamp>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WorkerFileContents {
    workers: Vec<WorkerConfig>,
}

impl WorkerFileWatcher {
    /// Reads the file for the first time.
    pub fn open(path: &Path) -> Result<(Self, Vec<WorkerConfig>), WorkerFileError> {
        let seen = stamp_of(path);
        Ok((Self { path: path.to_owned(), stamp: seen }, read(path)?))
    }

    /// Publishes the file's list whenever it changes. Never returns.
    pub async fn follow(self, discovery: Arc<WorkerDiscovery>, files: ReloadReporter) {
        let Self { path, stamp: seen } = self;
        let take = || {
            let workers = read(&path)?;
            tracing::info!(file = %path.display(), workers = workers.len(), "the file of workers was read anew");
            discovery.update_list((WorkerSource::File, 0), workers);
            Ok::<_, WorkerFileError>(())
        };
        follow((seen, || stamp_of(&path)), (POLL_INTERVAL, &files), take).await;
    }
}

fn read(path: &Path) -> Result<Vec<WorkerConfig>, WorkerFileError> {
    let refused = |problem: String| WorkerFileError { path: path.to_owned(), problem };
    let mut text = String::new();
    let file = std::fs::File::open(path).map_err(|error| refused(error.to_string()))?;
    file.take(MAX_BYTES + 1).read_to_string(&mut text).map_err(|error| refused(error.to_string()))?;
    if text.len() as u64 > MAX_BYTES {
        return Err(refused(format!("it is longer than {MAX_BYTES} bytes")));
    }
    let is_json = path.extension().is_some_and(|end| end.eq_ignore_ascii_case("json"));
    let list = if is_json { parse_json(&text) } else { parse_toml(&text) }
        .map_err(|InvalidWorkerList(problem)| refused(problem))?;
    match workers_problem(&list.workers) {
        Some((at, problem)) => Err(refused(format!("{at}: {problem}"))),
        None => Ok(list.workers),
    }
}

/// Why a list is invalid.
struct InvalidWorkerList(String);

fn parse_toml(text: &str) -> Result<WorkerFileContents, InvalidWorkerList> {
    let table: toml::Table = text.parse().map_err(|error| InvalidWorkerList(describe_toml_error(text, &error)))?;
    refuse_renamed(&table)?;
    serde_path_to_error::deserialize(toml::Value::Table(table)).map_err(|error| {
        let at = match error.path().to_string().as_str() {
            // The path of the whole file.
            "." => String::new(),
            path => format!("{path}: "),
        };
        InvalidWorkerList(format!("{at}{}", without_text(error.into_inner().message().trim())))
    })
}

fn refuse_renamed(table: &toml::Table) -> Result<(), InvalidWorkerList> {
    match renamed_keys::SETTINGS.find(table) {
        lines if lines.is_empty() => Ok(()),
        lines => Err(InvalidWorkerList(format!("it has settings that were renamed:\n  {}", lines.join("\n  ")))),
    }
}

fn parse_json(text: &str) -> Result<WorkerFileContents, InvalidWorkerList> {
    // A document that is no table of TOML's kinds is refused below, with its position.
    if let Ok(table) = serde_json::from_str(text) {
        refuse_renamed(&table)?;
    }
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let list = serde_path_to_error::deserialize(&mut deserializer).map_err(|error| {
        let at = match error.path().to_string().as_str() {
            "." | "?" => String::new(),
            path => format!("{path}: "),
        };
        InvalidWorkerList(format!("{at}{}", without_text(&error.into_inner().to_string())))
    })?;
    deserializer.end().map_err(|error| InvalidWorkerList(error.to_string()))?;
    Ok(list)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_written(name: &str, text: &str) -> Result<Vec<String>, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        let read = read(&path).map_err(|error| error.to_string())?;
        Ok(read.iter().map(|worker| format!("{} {}", worker.endpoint(), worker.role().as_str())).collect())
    }

    #[test]
    fn a_worker_file_is_toml_or_json_with_the_fields_of_the_configuration() {
        let toml = "[[workers]]\nurl = \"http://a:1#decode\"\n[[workers]]\nurl = \"http://b:1\"\nrole = \"prefill\"";
        assert_eq!(read_written("workers.toml", toml).unwrap(), ["http://a:1 decode", "http://b:1 prefill"]);
        let json =
            r#"{"workers": [{"url": "http://a:1", "models": ["m"], "parallelism": {"tensor": 2, "pipeline": 1}}]}"#;
        assert_eq!(read_written("workers.json", json).unwrap(), ["http://a:1 hybrid"]);
        assert_eq!(read_written("workers.toml", "workers = []").unwrap(), [] as [&str; 0]);
    }

    #[test]
    fn an_invalid_worker_file_names_the_position_and_what_is_accepted() {
        let twice = "[[workers]]\nurl = \"http://a:1\"\n[[workers]]\nurl = \"HTTP://A:1/\"";
        for (name, text, wanted) in [
            // A file that is still being written: an empty list is not intended.
            ("workers.toml", "", "workers.toml: missing field `workers`"),
            ("workers.json", "", "EOF"),
            ("workers.json", "{\"workers\": []} x", "trailing"),
            ("workers.toml", "[[workers]]\nurl = \"a\"", "workers[0].url: \"a\" has no scheme"),
            ("workers.toml", "[[workers]]\nurl = \"http://a:1\"\ncolour = 1", "unknown field `colour`"),
            ("workers.toml", "[[workers]\n", "line 1, column 11: "),
            ("workers.toml", "[[workers]]\nurl = \"http://u:sk-secret@a\"", "workers[0].url: \"...@a\" has more"),
            (
                "workers.toml",
                "[[workers]]\nurl = \"http://a\"\nmodels = \"sk-secret\"",
                "workers[0].models: invalid type: text",
            ),
            ("workers.toml", "[[workers]]\nurl = \"http://a\"\napi_key = \"sk-secret", "line 3, column"),
            (
                "workers.json",
                r#"{"workers": [{"url": "http://a", "models": "sk-secret"}]}"#,
                "workers[0].models: invalid type: text",
            ),
            ("workers.json", r#"{"workers": [{"url": "http://a", "api_key": "sk-secret}]}"#, "at line 1 column"),
            ("workers.toml", twice, "http://a:1 is listed twice"),
            (
                "workers.json",
                r#"{"workers": [{"url": "http://a:1", "parallelism": {"tensor": 0, "pipeline": 1}}]}"#,
                "1 or more",
            ),
        ] {
            let error = read_written(name, text).unwrap_err();
            assert!(
                error.contains(wanted)
                    && !error.contains("sk-secret")
                    && error.contains("a list of none is workers = []"),
                "{text}: {error}"
            );
        }
    }
}
