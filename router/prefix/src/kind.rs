//! How a chat template treats earlier turns, found out by rendering synthetic conversations at load.

use crate::ModelText;

/// Whether a longer conversation's prompt starts with the shorter one's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TemplateKind {
    /// Every turn only appends.
    AppendOnly,
    /// The last turns are rendered differently once more follows; what lies before stays.
    RewritesLastTurns,
    /// A later turn may change any earlier part, or the template could not be probed.
    Unsafe,
}

impl TemplateKind {
    pub(crate) fn probe(_text: &ModelText) -> Self {
        Self::Unsafe
    }
}
