//! The table of paths that clients may call.

use http::Method;

use crate::client_request::GenerationEndpoint;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum RouteHandler {
    /// Planned and executed by the pipeline.
    Generation(GenerationEndpoint),
    /// Forwarded to a worker that serves the model in the body.
    ByModel,
    /// As `Generation` if its body alone determines the prompt; its worker is recorded.
    NewResponse,
    /// Forwarded to the worker that stores the response.
    StoredResponse,
    /// The union of the workers' models.
    Models,
    OneModel,
    /// Always healthy.
    Alive,
    /// Healthy while a worker is ready.
    Ready,
    Unknown,
}

impl RouteHandler {
    /// Whether it counts against a tenant's quotas of requests: everything that causes new requests to engines.
    pub(super) fn is_metered(self) -> bool {
        self.uses_tokens() || self == Self::StoredResponse
    }

    /// Whether it counts against a tenant's quota of tokens. Reading a stored response costs none again.
    pub(super) fn uses_tokens(self) -> bool {
        matches!(self, Self::Generation(_) | Self::ByModel | Self::NewResponse | Self::Models | Self::OneModel)
    }
}

/// A path and its handler.
#[derive(Debug)]
pub(super) struct Route {
    /// The path in axum's pattern syntax; also the label in metrics.
    pub(super) path: &'static str,
    pub(super) handler: RouteHandler,
    /// The allowed methods, in the format of the `Allow` header.
    pub(super) allow: &'static str,
}

impl Route {
    /// Whether `method` is one of those in `allow`.
    pub(super) fn allows(&self, method: &Method) -> bool {
        self.allow.split(", ").any(|allowed| allowed == method.as_str())
    }
}

const POST: &str = "POST, OPTIONS";
const GET: &str = "GET, HEAD, OPTIONS";

const fn route(path: &'static str, served: RouteHandler, allow: &'static str) -> Route {
    Route { path, handler: served, allow }
}

/// All served paths.
pub(super) static ROUTES: &[Route] = &[
    route("/v1/chat/completions", RouteHandler::Generation(GenerationEndpoint::ChatCompletions), POST),
    route("/v1/completions", RouteHandler::Generation(GenerationEndpoint::Completions), POST),
    route("/v1/models", RouteHandler::Models, GET),
    route("/v1/models/{*model}", RouteHandler::OneModel, GET),
    route("/v1/embeddings", RouteHandler::ByModel, POST),
    route("/v1/messages", RouteHandler::Generation(GenerationEndpoint::Messages), POST),
    route("/v1/messages/count_tokens", RouteHandler::ByModel, POST),
    route("/tokenize", RouteHandler::ByModel, POST),
    route("/detokenize", RouteHandler::ByModel, POST),
    route("/v1/rerank", RouteHandler::ByModel, POST),
    route("/v1/score", RouteHandler::ByModel, POST),
    route("/v1/responses", RouteHandler::NewResponse, POST),
    route("/v1/responses/{id}", RouteHandler::StoredResponse, "GET, HEAD, DELETE, OPTIONS"),
    route("/v1/responses/{id}/cancel", RouteHandler::StoredResponse, POST),
    route("/v1/responses/{id}/input_items", RouteHandler::StoredResponse, GET),
    route("/livez", RouteHandler::Alive, GET),
    route("/readyz", RouteHandler::Ready, GET),
    route("/health", RouteHandler::Ready, GET),
];

/// Stands for all other paths.
pub(super) static UNKNOWN: Route = route("other", RouteHandler::Unknown, "");

/// Parts of the OpenAI API that keep state at the server, which workers do not share: refused with an error that names
/// them.
pub(super) const UNSUPPORTED_PREFIXES: &[&str] = &[
    "/v1/files",
    "/v1/uploads",
    "/v1/batches",
    "/v1/assistants",
    "/v1/threads",
    "/v1/vector_stores",
    "/v1/fine_tuning",
    "/v1/conversations",
    "/v1/containers",
    "/v1/evals",
    "/v1/realtime",
];
