//! The LoRA adapters served on top of the model.

use std::collections::BTreeSet;

use crate::sim::SimStartError;

/// Maximum number of adapters served at a time.
const MAX_ADAPTERS: usize = 64;
/// Maximum length of a name in bytes.
const MAX_NAME_BYTES: usize = 128;

/// Names of adapters, all different from the model's name.
pub(crate) struct AdapterNames {
    model: String,
    names: BTreeSet<String>,
}

/// Why an adapter cannot be served.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct UnservableAdapter;

impl AdapterNames {
    /// Creates the set that the worker starts with.
    pub(crate) fn of(model: &str, names: Vec<String>) -> Result<Self, SimStartError> {
        let mut adapters = Self { model: model.to_owned(), names: BTreeSet::new() };
        let must = "at most 64 different names, each of 1 to 128 bytes and none of them the model's";
        let invalid = |UnservableAdapter| SimStartError::Option { option: "lora_adapter", must };
        for name in names {
            if adapters.serves(&name) {
                return Err(invalid(UnservableAdapter));
            }
            adapters.add(name).map_err(invalid)?;
        }
        Ok(adapters)
    }

    /// Adds an adapter; has no effect if it is already there.
    pub(crate) fn add(&mut self, name: String) -> Result<(), UnservableAdapter> {
        if self.serves(&name) {
            return Ok(());
        }
        let fits =
            !name.is_empty() && name.len() <= MAX_NAME_BYTES && name != self.model && self.names.len() < MAX_ADAPTERS;
        if !fits {
            return Err(UnservableAdapter);
        }
        self.names.insert(name);
        Ok(())
    }

    /// Removes an adapter; returns whether it was there.
    pub(crate) fn remove(&mut self, name: &str) -> bool {
        self.names.remove(name)
    }

    pub(crate) fn serves(&self, name: &str) -> bool {
        self.names.contains(name)
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.names.iter().map(String::as_str)
    }
}
