//! Reads TOML files of formats of their own, such as profiles.

use serde::de::DeserializeOwned;
use toml::{Table, Value};

use crate::renamed_keys::RenamedKeys;
use crate::toml_errors::{describe_toml_error, without_text};

/// What is wrong in a file of its own format, such as a profile.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct TomlFileError(String);

/// Reads a TOML file of its own format, in which keys may have been renamed.
pub fn read_toml<T: DeserializeOwned>(text: &str, keys: RenamedKeys) -> Result<T, TomlFileError> {
    let table: Table = text.parse().map_err(|error| TomlFileError(describe_toml_error(text, &error)))?;
    let renamed = keys.find(&table);
    if !renamed.is_empty() {
        return Err(TomlFileError(format!("it has keys that were renamed:\n  {}", renamed.join("\n  "))));
    }
    serde_path_to_error::deserialize(Value::Table(table)).map_err(|error| {
        let path = error.path().to_string();
        let problem = without_text(error.into_inner().message().trim());
        // "." is the path of the whole file.
        TomlFileError(if path == "." { problem } else { format!("{path}: {problem}") })
    })
}
