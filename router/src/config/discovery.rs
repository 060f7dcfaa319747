//! Where workers are found, beside `[[workers]]`.

use std::path::PathBuf;

use serde::Deserialize;

/// Section `[discovery]`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DiscoveryConfig {
    /// A file of `[[workers]]`, or of `{"workers": [...]}` where it ends in `.json`, read anew when it changes.
    pub workers_file: Option<PathBuf>,
}

impl DiscoveryConfig {
    /// Whether workers are found anywhere but in the configuration.
    pub fn finds(&self) -> bool {
        self.workers_file.is_some()
    }
}
