//! What of an engine's answer the client sees.

/// Whether the client sees token ids.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TokenIdVisibility {
    /// The client requested them.
    All,
    /// Only the router requested them.
    None,
}

/// Whether usage events are forwarded to the client.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum UsageEventVisibility {
    #[default]
    Shown,
    Hidden,
}
