//! Sending a request to a worker as it is, with no plan: the least loaded one, and another if that one is dead.

use std::sync::Arc;

use axum::response::Response;
use bytes::Bytes;
use http::StatusCode;
use vocabulary::{Health, ModelId, Tokens, WorkerId};
use workers_shim::dialect::{LegOptions, RequestBody, Stripped, Usage};

use crate::error::{Addressee, ApiError};
use crate::gateway::Gateway;
use crate::incoming::Incoming;
use crate::pipeline::aside::Load;
use crate::pipeline::finish::{UNBOUNDED_ANSWER, most_believed};
use crate::quotas::{BYTES_PER_TOKEN, Came, Reserved};
use crate::relay::{Observer, is_event_stream, relay};
use crate::resources::filing::Filing;
use crate::resources::listener::{Form, Listener};
use crate::roster::Sent;
use crate::upstream::{Outgoing, UpstreamError, WorkerBody, direct};

/// Most workers tried for one request.
const ATTEMPTS: usize = 3;

/// Which workers will do.
#[derive(Clone, Copy, Debug)]
pub enum Where<'a> {
    /// Any that serves the model; any at all for `None`.
    Model(Option<&'a str>),
    /// This one only.
    Only(WorkerId),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Learn {
    Nothing,
    /// The id of the response that the worker made, and what it says where its transcript is kept.
    Response,
    /// The same of a step that follows a stored response; and what is filed of every step.
    Step,
}

/// `request` without what only routers may send, and with the tenant's cache salt: the paths that no plan is made for
/// lead into the same engines and caches. With what was left out, to be counted once a request.
pub async fn cleaned(gateway: &Gateway, mut request: Incoming) -> Result<(Incoming, Stripped), ApiError> {
    let options = LegOptions { salt: gateway.salts.of(&request.tenant), ..LegOptions::default() };
    let load = Load::of(&request);
    let work = move || {
        let body = RequestBody::read(request.body).map_err(ApiError::unreadable)?;
        let stripped = body.stripped(&options);
        request.body = body.plain(&options);
        Ok((request, stripped))
    };
    load.done(&gateway.aside, work).await?
}

/// Forwards `request` and relays the answer. A worker that cannot be reached, or that breaks before its answer begins,
/// is left out and another one tried.
pub(crate) async fn forward(
    gateway: &Arc<Gateway>,
    request: &Incoming,
    to: Where<'_>,
    learn: Learn,
) -> Result<Response, ApiError> {
    let barred = gateway.barred();
    let mut tried = Vec::new();
    let reserved = request.reserved.clone();
    loop {
        let sent = choose(gateway, to, (&tried, &barred))?;
        let worker = sent.member.id;
        reserved.iter().for_each(Reserved::begin);
        match attempt(gateway, request, &sent).await {
            Ok(answer) => {
                let form = if is_event_stream(answer.headers()) { Form::Events } else { Form::Whole };
                let (listener, filing) = learning(gateway, request, (learn, worker), (answer.status(), form)).await;
                let (gateway, client) = (gateway.clone(), request.addressee());
                let reserved = reserved.map(|reserved| (reserved, answer.status().is_success()));
                let budget = gateway.upstream.events();
                let most = Counted::most(request, learn, filing.as_ref().and_then(Filing::asked));
                let watch = Watch { gateway, client, _sent: sent, listener, filing, reserved, most };
                return Ok(relay(answer, budget, watch));
            }
            Err(error) => {
                reserved.iter().for_each(Reserved::came_to_nothing);
                tracing::warn!(worker = %sent.member.config.endpoint(), request = %request.id, %error, "try failed");
                if let UpstreamError::Connect(_) = &error {
                    gateway.fleet().unreachable(worker);
                }
                tried.push(worker);
                if !error.retryable() || matches!(to, Where::Only(_)) || tried.len() == ATTEMPTS {
                    return Err(client_error(&error));
                }
                gateway.metrics.requests.retries.with_label_values(&[error.as_ref()]).inc();
            }
        }
    }
}

fn choose(gateway: &Gateway, to: Where<'_>, (tried, barred): (&[WorkerId], &[WorkerId])) -> Result<Sent, ApiError> {
    let gone = || ApiError::WorkerFailed { detail: "no worker that could serve this is reachable".into() };
    let (roster, fleet) = (&gateway.roster, gateway.fleet());
    match to {
        Where::Only(id) if tried.contains(&id) => Err(gone()),
        Where::Only(id) if barred.contains(&id) => Err(ApiError::SaltsIgnored { model: "any".into() }),
        Where::Only(id) => roster.send_to(fleet, id).ok_or_else(gone),
        Where::Model(model) => {
            // Trials are for requests whose end tells something.
            let workers = fleet.snapshot();
            let ejected = gateway.policies.outliers.lock().all_ejected(&workers);
            // Whether one of those would serve it.
            let is_barred = workers.iter().any(|worker| {
                barred.contains(&worker.id)
                    && worker.health != Health::Unreachable
                    && model.is_none_or(|model| worker.models.contains(&ModelId::from(model)))
            });
            match roster.pick(fleet, model, (&[tried, barred].concat(), &ejected)) {
                Err(ApiError::NoWorker { .. }) if !tried.is_empty() => Err(gone()),
                Err(ApiError::NoWorker { model }) if is_barred => Err(ApiError::SaltsIgnored { model }),
                picked => picked,
            }
        }
    }
}

async fn attempt(
    gateway: &Gateway,
    request: &Incoming,
    sent: &Sent,
) -> Result<http::Response<WorkerBody>, UpstreamError> {
    let member = &sent.member;
    let outgoing = Outgoing {
        method: request.method.clone(),
        path: request.path.clone(),
        headers: gateway.headers_for(member, &request.headers_with_own_id()),
        body: request.body.clone(),
    };
    direct(gateway.upstream.send(member.config.endpoint(), outgoing).await?)
}

/// What a client is told about a worker's failure: not where it is.
pub fn client_error(error: &UpstreamError) -> ApiError {
    let failed = |detail: &str| ApiError::WorkerFailed { detail: detail.into() };
    match error {
        UpstreamError::Connect(_) => failed("it cannot be reached"),
        UpstreamError::Broken(_) => failed("it broke off before its answer began"),
        UpstreamError::Timeout(_) => ApiError::WorkerTimeout,
        UpstreamError::Redirect(_) => failed("it answered with a redirect, which is not followed"),
        UpstreamError::Unsendable(_) => failed("the request cannot be put into HTTP"),
    }
}

async fn learning(
    gateway: &Arc<Gateway>,
    request: &Incoming,
    (learn, worker): (Learn, WorkerId),
    (status, form): (StatusCode, Form),
) -> (Option<Listener>, Option<Filing>) {
    let responses = gateway.remembered.responses.clone();
    let is_wanted = learn != Learn::Nothing && status.is_success();
    let filed = match learn {
        Learn::Step => Filing::of(gateway, request, (worker, status, form)).await,
        Learn::Nothing | Learn::Response => None,
    };
    let session = filed.as_ref().and_then(Filing::session);
    let listener = is_wanted.then(|| Listener::new(responses, (request, session), worker, form));
    (listener, filed)
}

/// Most tokens that a worker can have counted.
#[derive(Clone, Copy)]
struct Counted {
    prompt: Tokens,
    answer: Tokens,
}

impl Counted {
    /// For a request whose answer may have `asked` tokens, where it says so. What a step goes on after lies at its worker.
    fn most(request: &Incoming, learn: Learn, asked: Option<Tokens>) -> Self {
        let history = if learn == Learn::Nothing { Tokens::ZERO } else { UNBOUNDED_ANSWER };
        let prompt = most_believed(Tokens(request.body.len() as u64 / BYTES_PER_TOKEN)).max(history);
        Self { prompt, answer: asked.map_or(history, most_believed).max(most_believed(Tokens::ZERO)) }
    }

    fn covers(self, usage: &Usage, delivered: Tokens) -> bool {
        usage.prompt <= self.prompt && usage.completion <= self.answer.max(most_believed(delivered))
    }
}

/// Keeps the request counted at its worker while the answer runs, and learns from it.
struct Watch {
    gateway: Arc<Gateway>,
    client: Addressee,
    _sent: Sent,
    listener: Option<Listener>,
    filing: Option<Filing>,
    /// What was taken from the tenant's quota, and whether the worker took the request.
    reserved: Option<(Reserved, bool)>,
    most: Counted,
}

impl Observer for Watch {
    fn ended(&mut self, usage: Option<Usage>, delivered: Tokens) {
        let Some((reserved, is_taken)) = &self.reserved else { return };
        if !is_taken {
            // Another worker may be sent it.
            return reserved.came_to_nothing();
        }
        let believed = usage.filter(|usage| self.most.covers(usage, delivered));
        self.gateway.metrics.requests.usage_disbelieved.inc_by(u64::from(usage != believed));
        let used = match believed {
            Some(usage) => usage.prompt + usage.completion.max(delivered),
            None => reserved.taken() + delivered,
        };
        reserved.settle(used, Came::ToItsEnd);
    }

    fn piece(&mut self, data: &Bytes) {
        if let Some(listener) = &mut self.listener {
            listener.piece(data);
        }
        if let Some(filing) = &mut self.filing {
            filing.piece(data);
        }
    }

    fn broken(&mut self) -> Bytes {
        if let Some(filing) = &mut self.filing {
            filing.broken();
        }
        self.gateway.metrics.requests.errors.with_label_values(&["worker_broke_off"]).inc();
        let number = self.listener.as_ref().map_or(0, Listener::next_number);
        ApiError::WorkerFailed { detail: "it broke off inside its answer".into() }.event(self.client, number)
    }
}
