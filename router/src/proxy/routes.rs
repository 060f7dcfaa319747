//! The table of paths that clients may use.

use http::Method;

use crate::incoming::Endpoint;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Served {
    /// Planned and executed by the pipeline.
    Generation(Endpoint),
    /// Forwarded to a worker that serves the model in the body.
    ByModel,
    /// As `Generation` where nothing but its body decides what it is, and remembered who made it.
    NewResponse,
    /// Forwarded to who made it.
    StoredResponse,
    /// The union of the workers' models.
    Models,
    OneModel,
    /// Always well.
    Alive,
    /// Well when a worker is.
    Ready,
    Unknown,
}

impl Served {
    /// Whether it counts against a tenant's quotas: whatever engines are asked for anew.
    pub(super) fn costs(self) -> bool {
        matches!(self, Self::Generation(_) | Self::ByModel | Self::NewResponse | Self::Models | Self::OneModel)
    }
}

/// A path, and what it does.
#[derive(Debug)]
pub(super) struct Route {
    /// As axum writes patterns; also the label in metrics.
    pub(super) path: &'static str,
    pub(super) served: Served,
    /// The methods it takes, as the header `Allow` lists them.
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

const fn route(path: &'static str, served: Served, allow: &'static str) -> Route {
    Route { path, served, allow }
}

/// Everything that is served.
pub(super) static ROUTES: &[Route] = &[
    route("/v1/chat/completions", Served::Generation(Endpoint::ChatCompletions), POST),
    route("/v1/completions", Served::Generation(Endpoint::Completions), POST),
    route("/v1/models", Served::Models, GET),
    route("/v1/models/{*model}", Served::OneModel, GET),
    route("/v1/embeddings", Served::ByModel, POST),
    route("/v1/messages", Served::Generation(Endpoint::Messages), POST),
    route("/v1/messages/count_tokens", Served::ByModel, POST),
    route("/tokenize", Served::ByModel, POST),
    route("/detokenize", Served::ByModel, POST),
    route("/v1/rerank", Served::ByModel, POST),
    route("/v1/score", Served::ByModel, POST),
    route("/v1/responses", Served::NewResponse, POST),
    route("/v1/responses/{id}", Served::StoredResponse, "GET, HEAD, DELETE, OPTIONS"),
    route("/v1/responses/{id}/cancel", Served::StoredResponse, POST),
    route("/v1/responses/{id}/input_items", Served::StoredResponse, GET),
    route("/livez", Served::Alive, GET),
    route("/readyz", Served::Ready, GET),
    route("/health", Served::Ready, GET),
];

/// Stands for all other paths.
pub(super) static UNKNOWN: Route = route("other", Served::Unknown, "");

/// Parts of the OpenAI API that keep state at the server, which workers do not share: refused by name.
pub(super) const NOT_OFFERED: &[&str] = &[
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
