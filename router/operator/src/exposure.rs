//! Exposed listeners, which strangers on the network can use or overhear. The operator API shows them.

use serde::Serialize;
use utoipa::ToSchema;

/// A listener beyond loopback that lacks authentication or TLS.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, ToSchema)]
pub struct ExposedListener {
    /// `clients` or `operators`.
    listener: &'static str,
    /// `unauthenticated`: nobody has to authenticate. `no_tls`: keys or tokens are sent without TLS.
    pub reason: &'static str,
    /// What that means, and which setting ends it.
    pub detail: &'static str,
}

/// The clients' listener asks for no key.
pub const CLIENTS_UNAUTHENTICATED: ExposedListener = ExposedListener {
    listener: "clients",
    reason: "unauthenticated",
    detail: "ANYBODY who reaches the clients' listener can use the engines: it is not bound to loopback and asks for no key; \
             set auth.keys_file",
};
/// The clients' listener takes keys without TLS.
pub const CLIENTS_NO_TLS: ExposedListener = ExposedListener {
    listener: "clients",
    reason: "no_tls",
    detail: "clients' API keys go over the network as plain text: set proxy.tls, or listen on loopback behind a proxy that \
             ends TLS",
};
/// The operators' listener asks for no token.
pub const OPERATORS_UNAUTHENTICATED: ExposedListener = ExposedListener {
    listener: "operators",
    reason: "unauthenticated",
    detail: "ANYBODY who reaches the operators' listener can change owners and members: it is not bound to loopback and asks \
             for no token; set operator.tokens_file",
};
/// The operators' listener takes tokens without TLS.
pub const OPERATORS_NO_TLS: ExposedListener = ExposedListener {
    listener: "operators",
    reason: "no_tls",
    detail: "operators' tokens go over the network as plain text: set operator.tls",
};
