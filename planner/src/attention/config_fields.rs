//! Reads the fields of a `config.json` with bounds checks. The file is untrusted.

use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use super::SpecError;

/// One JSON object of the file. A null field counts as absent.
pub(super) struct ConfigObject<'a> {
    /// Path of the object, with a trailing dot; empty for the file itself.
    path: &'static str,
    map: &'a Map<String, Value>,
}

impl<'a> ConfigObject<'a> {
    pub(super) fn of_file(map: &'a Map<String, Value>) -> Self {
        Self { path: "", map }
    }

    /// Returns the language part of a multimodal model, if any.
    pub(super) fn text_part(&self) -> Option<Self> {
        self.value("text_config")?.as_object().map(|map| Self { path: "text_config.", map })
    }

    pub(super) fn number(&self, name: &str, accepted: RangeInclusive<u64>) -> Result<Option<u64>, SpecError> {
        let Some(value) = self.value(name) else { return Ok(None) };
        let found = value.as_u64().filter(|number| accepted.contains(number));
        found.map(Some).ok_or_else(|| self.wrong(name, value, range(&accepted)))
    }

    pub(super) fn required_number(&self, name: &str, accepted: RangeInclusive<u64>) -> Result<u64, SpecError> {
        self.number(name, accepted.clone())?.ok_or_else(|| self.missing(name, range(&accepted)))
    }

    pub(super) fn flag(&self, name: &str) -> Result<Option<bool>, SpecError> {
        let Some(value) = self.value(name) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| self.wrong(name, value, "true or false"))
    }

    pub(super) fn text(&self, name: &str) -> Result<Option<&'a str>, SpecError> {
        let Some(value) = self.value(name) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.wrong(name, value, "a text"))
    }

    pub(super) fn list(&self, name: &str) -> Result<Option<&'a [Value]>, SpecError> {
        let Some(value) = self.value(name) else { return Ok(None) };
        value.as_array().map(|list| Some(&**list)).ok_or_else(|| self.wrong(name, value, "a list"))
    }

    pub(super) fn wrong(&self, name: &str, found: impl std::fmt::Display, accepted: impl Into<String>) -> SpecError {
        SpecError::field(&format!("{}{name}", self.path), found, accepted)
    }

    pub(super) fn missing(&self, name: &str, accepted: impl Into<String>) -> SpecError {
        self.wrong(name, "missing", accepted)
    }

    fn value(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }
}

fn range(accepted: &RangeInclusive<u64>) -> String {
    format!("a whole number, {} to {}", accepted.start(), accepted.end())
}
