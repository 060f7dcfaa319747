//! `/livez`, `/readyz` and `/metrics`: liveness, readiness and metrics.

use std::fmt::Write as _;
use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use http::HeaderMap;
use http::header::CONTENT_TYPE;
use ownership::MemberRole;
use serde::Serialize;
use utoipa::ToSchema;
use vocabulary::{WorkerId, WorkerView};

use super::consistency::LedgerResponse;
use super::correctness;
use super::gauges;
use super::guardrail;
use super::problem::Problem;
use super::state::OperatorState;
use crate::adapters;
use crate::app_state::AppState;
use crate::discovery::WorkerSource;
use crate::exposure::exposures;
use crate::prefix_cache::tokenizer_drift::{DriftSignal, MismatchScope, TokenizerMismatch, advice};
use crate::tenant_isolation::NotServing;

/// Whether the process lives.
#[utoipa::path(get, path = "/livez", tag = "process",
    responses((status = 200, description = "It does.", body = String, content_type = "text/plain")))]
pub(super) async fn live() -> &'static str {
    "ok\n"
}

/// What this node does in the quorum.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum QuorumRole {
    Leader,
    Voter,
    Learner,
    /// It was taken out of the cluster and only has its last view.
    Removed,
}

/// Message about workers excluded because they would not keep tenants apart.
const SALTS_IGNORED: &str = "engines ignore cache_salt, so that tenants would find out what others have sent, and serve no \
    requests; update them, or set auth.verify_cache_salt = false where tenants may share caches";

/// What is wrong while requests are served all the same.
#[derive(Serialize, ToSchema)]
struct Degradation {
    /// `workers`, `ledger`, `soft_state`, `identity`, `guardrail`, `correctness`, `audit`, `files`, `discovery`, `listeners`,
    /// `tasks`, `process`, `salts` or `tenants`.
    what: &'static str,
    /// As the metrics call it: `no_quorum`, `removed`, `failed`, `folder_gone`; of workers `draining`, `ejected` or `salts_ignored`; of Redis how it
    /// stands, or `other_secret`; of a model `distrusted`, `engine_disagrees`, `cache_disagrees`, `template`, `adapter_not_configured` or
    /// `adapter_not_served`; of the guardrail `action_slower` or `placement_slower`; of correctness `wrong_text`; of the audit log `failed`;
    /// of files that cannot be read what they hold; of discovery who lists workers; of listeners `open` or `plain_text`; of
    /// tasks `ended`; of the process `shortage`; of salts `salt_untold`; of tenants `no_key`.
    cause: &'static str,
    /// In words. Names of workers, models and files, and errors, only for those who show a token.
    detail: String,
}

impl Degradation {
    /// Returns the same without names, paths and errors, for unauthenticated callers.
    fn redacted(self) -> Self {
        let what = match self.what {
            "workers" => "workers take no new sessions, or only trials, or nothing",
            "ledger" => "the ledger cannot be changed, or this node does not keep it",
            "soft_state" => "Redis is not used, or not as it should be",
            "identity" => "prompts of a model are known less exactly than they could be",
            "guardrail" => "an action made sessions slower and is switched off",
            "correctness" => "KV came as something else over a link, which is barred",
            "audit" => "the audit log takes no line, so that operators' writes are refused",
            "files" => "a file that changed is not used, what was read before still is",
            "discovery" => "workers cannot be looked up, those that were found before stay",
            "listeners" => "a listener on the network lacks authentication or TLS",
            "tenants" => "quotas limit nobody, because no key names their tenants",
            "tasks" => "a task in the background ended in an error and was begun anew",
            "process" => "the ledger waits for what this process lacks",
            "salts" => "whether engines keep tenants apart is not proven",
            _ => "something is not as it should be",
        };
        Self { detail: format!("{what}; asked with a token this says more"), ..self }
    }

    fn of_ejected_workers(gateway: &AppState) -> Option<Self> {
        let workers = gateway.fleet().snapshot();
        let outliers = gateway.policies.outliers.lock();
        let told = |view: &WorkerView| Some(format!("{} ({})", view.endpoint, outliers.ejection(view)?.cause.as_ref()));
        let told: Vec<_> = workers.iter().filter_map(told).collect();
        (!told.is_empty()).then(|| Self {
            what: "workers",
            cause: "ejected",
            detail: format!("requests failed there, so that only trials go there for a while: {}", told.join(", ")),
        })
    }

    fn of_salts(gateway: &AppState) -> Option<Self> {
        if !gateway.isolation.keys().has_several_tenants() {
            return None;
        }
        let workers = gateway.fleet().snapshot();
        let untold = workers.iter().filter(|view| gateway.isolation.salt_proofs().untold(view.id).is_some());
        let untold: Vec<_> = untold.map(|view| view.endpoint.to_string()).collect();
        (!untold.is_empty()).then(|| Self {
            what: "salts",
            cause: "salt_untold",
            detail: format!(
                "whether these engines honour cache_salt is not proven, because they do not tell cached tokens, so that tenants may \
                 find out what others have sent: {}; start vLLM with --enable-prompt-tokens-details",
                untold.join(", ")
            ),
        })
    }

    /// Reports workers whose engines ignore cache salts although tenants must be kept apart.
    fn of_ignored_salts(gateway: &AppState) -> Option<Self> {
        let barred = gateway.isolation.barred_workers();
        let told: Vec<_> = barred.iter().filter_map(|id| gateway.workers.worker(*id)).collect();
        let told: Vec<_> = told.iter().map(|worker| worker.config.endpoint().as_ref()).collect();
        (!told.is_empty()).then(|| Self {
            what: "workers",
            cause: "salts_ignored",
            detail: format!("{SALTS_IGNORED}: {}", told.join(", ")),
        })
    }

    fn of_tokenizer_mismatch(gateway: &AppState, doubt: &TokenizerMismatch) -> Self {
        let endpoint = |worker: &WorkerId| {
            gateway
                .workers
                .worker(*worker)
                .map_or_else(|| worker.to_string(), |worker| worker.config.endpoint().to_string())
        };
        let at: Vec<String> = doubt.workers.iter().map(endpoint).collect();
        let reach = match doubt.scope {
            MismatchScope::Workers => "there",
            MismatchScope::Model => "everywhere",
        };
        let (model, at) = (&doubt.model, at.join(", "));
        let shows = match doubt.signal {
            DriftSignal::Counted => format!("prompts of {model} have other tokens at {at} than were computed here"),
            DriftSignal::Found => format!(
                "of prompts of {model} more is found in the cache at {at} than KV events told of the tokens that were computed \
                 here: they are as many and other ones"
            ),
        };
        let detail = format!("{shows}, so that its steps are known as fallback {reach}; {}", advice(model));
        Self { what: "identity", cause: doubt.signal.into(), detail }
    }
}

/// That requests are served, and what is wrong meanwhile.
#[derive(Serialize, ToSchema)]
pub(super) struct Readiness {
    ready: bool,
    /// This node's id.
    node: u64,
    #[schema(inline)]
    standing: QuorumRole,
    degraded: Vec<Degradation>,
}

impl Readiness {
    fn of(desk: &OperatorState) -> Self {
        let gateway = &desk.gateway;
        let directory = gateway.directory();
        let own = directory.members().into_iter().find(|member| member.node == directory.node());
        let standing = match own {
            _ if directory.is_removed() => QuorumRole::Removed,
            Some(own) if own.is_leader => QuorumRole::Leader,
            Some(own) if own.voter == MemberRole::Voter => QuorumRole::Voter,
            _ => QuorumRole::Learner,
        };
        let ledger = gateway.ledger.ledger_problems().into_iter();
        let ledger = ledger.map(|it| Degradation { what: "ledger", cause: it.into(), detail: it.to_string() });
        let redis = gateway.caches.shared_cache.degraded_health().map(|it| Degradation {
            what: "soft_state",
            cause: it.into(),
            detail: format!("Redis is {}", it.as_ref()),
        });
        let secret = gateway.caches.shared_cache.has_other_secret().then(|| Degradation {
            what: "soft_state",
            cause: "other_secret",
            detail:
                "another router of this namespace has another shared_cache.encryption_secret, so that neither reads what the other \
                     writes to Redis"
                    .into(),
        });
        let draining = gateway.worker_pool.ready(gateway.fleet()).is_empty().then(|| Degradation {
            what: "workers",
            cause: "draining",
            detail:
                "every worker that answers is being drained: what comes is served there all the same, because nobody \
                     else can, and nothing new is owned; take a worker back, or add one"
                    .into(),
        });
        let ejected =
            Degradation::of_ejected_workers(gateway).into_iter().chain(Degradation::of_ignored_salts(gateway));
        let slower = guardrail::reverted_action_details(gateway).map(|(cause, detail)| Degradation {
            what: "guardrail",
            cause,
            detail,
        });
        let barred = correctness::barred_link_details(gateway).map(|detail| Degradation {
            what: "correctness",
            cause: "wrong_text",
            detail,
        });
        let audit = desk.audit.is_broken().then(|| Degradation {
            what: "audit",
            cause: "failed",
            detail: "the audit log takes no line, so that operators' writes are refused".into(),
        });
        let files = gateway.stale_files().reasons().into_iter().map(|(cause, why)| Degradation {
            what: "files",
            cause,
            detail: format!("a file that changed is not used, what was read before still is: {why}"),
        });
        let lookups = gateway.discovery().failures().into_iter().map(|(source, why)| Degradation {
            what: "discovery",
            cause: source.into(),
            detail: format!("{why}; the workers that were found before stay"),
        });
        let tasks = directory.supervision().recently_ended().into_iter().map(|task| Degradation {
            what: "tasks",
            cause: "ended",
            detail: format!(
                "the background task {task} ended in an error of ours in the last five minutes, and was begun anew: the log has \
                 it; please report it"
            ),
        });
        let exposed = exposures(&gateway.config).into_iter().map(|it| Degradation {
            what: "listeners",
            cause: it.cause,
            detail: it.detail.into(),
        });
        let short = directory.resource_shortage().map(|what| Degradation {
            what: "process",
            cause: "shortage",
            detail: format!("the ledger waits for what this process lacks: {what}"),
        });
        let degraded = draining
            .into_iter()
            .chain(ejected)
            .chain(ledger)
            .chain(redis)
            .chain(secret)
            .chain(Self::of_prefix_cache(gateway))
            .chain(slower)
            .chain(barred)
            .chain(audit)
            .chain(files)
            .chain(lookups)
            .chain(tasks)
            .chain(short)
            .chain(Degradation::of_salts(gateway))
            .chain(Self::of_tenants(gateway))
            .chain(exposed)
            .collect();
        Self { ready: true, node: directory.node().0, standing, degraded }
    }

    /// Reports quotas that apply to no tenant, as after a misspelt name.
    fn of_tenants(gateway: &AppState) -> Option<Degradation> {
        let count =
            gateway.isolation.keys().tenants_without_key(gateway.config.tenants.keys().map(String::as_str)).len();
        let why = match gateway.isolation.keys().required() {
            true => "no key of auth.keys_file names them",
            false => "without auth.keys_file everybody is the tenant \"default\"",
        };
        (count > 0).then(|| Degradation {
            what: "tenants",
            cause: "no_key",
            // Anybody may read this, so tenant names are only logged.
            detail: match count {
                1 => format!("quotas of one section limit nobody, because {why}; the log names it"),
                count => {
                    format!("quotas of {count} sections limit nobody, because {why}; the log names the first of them")
                }
            },
        })
    }

    /// Reports prompts that are known less precisely than possible.
    fn of_prefix_cache(gateway: &AppState) -> impl Iterator<Item = Degradation> {
        let identity = gateway.catalog().disabled_by_spot_check().map(|model| Degradation {
            what: "identity",
            cause: "distrusted",
            detail: format!("prompts of {model} are computed as a whole: one that was put together differed"),
        });
        let templates = gateway.catalog().bad_templates();
        let identity = identity.chain(templates.map(|bad| Degradation {
            what: "identity",
            cause: "template",
            detail: bad.to_string(),
        }));
        let doubts = gateway.caches.prefix_cache.tokenizer_drift.suspected_mismatches();
        let identity =
            identity.chain(doubts.into_iter().map(|doubt| Degradation::of_tokenizer_mismatch(gateway, &doubt)));
        let odd = adapters::mismatches(gateway).into_iter();
        identity.chain(odd.map(|odd| Degradation { what: "identity", cause: odd.cause(), detail: odd.to_string() }))
    }
}

/// Whether it can serve clients: some worker answers, and this router is not asked to end.
///
/// Anybody may ask. Where tokens are configured, workers' URLs, models, files and errors are named only to those who show one.
///
/// What is wrong with the ledger or with Redis, or that all workers are drained, is told and takes no traffic away: steps
/// are served all the same, and any other router stands there alike.
#[utoipa::path(get, path = "/readyz", tag = "process",
    responses(
        (status = 200, description = "It can.", body = LedgerResponse<Readiness>),
        (status = 503, description = "No worker answers and may serve, or this router is ending.")))]
pub(super) async fn ready(
    State(desk): State<OperatorState>,
    headers: HeaderMap,
) -> Result<LedgerResponse<Readiness>, Problem> {
    let gateway = &desk.gateway;
    let is_stranger = desk.tokens.authenticate(&headers).is_err();
    if desk.is_shutting_down() {
        return Err(Problem::not_ready("This router is ending: what it began it brings to its end. Ask another one."));
    }
    match gateway.isolation.serving(&gateway.workers) {
        Ok(()) => {
            if desk.audit.is_broken() {
                // The result shows in the next request: this one must not wait for the disk.
                let audit = desk.audit.clone();
                drop(tokio::task::spawn_blocking(move || audit.probe_space()));
            }
            let mut readiness = Readiness::of(&desk);
            if is_stranger {
                readiness.degraded = readiness.degraded.into_iter().map(Degradation::redacted).collect();
            }
            Ok(LedgerResponse::new(&gateway.directory().view(), readiness))
        }
        Err(NotServing::SaltsIgnored) => {
            Err(Problem::not_ready(format!("No worker that answers may serve: {SALTS_IGNORED}.")))
        }
        Err(NotServing::NobodyAnswers) => {
            let (workers, mut failures) = (gateway.fleet().snapshot(), gateway.discovery().failures());
            if is_stranger {
                failures.iter_mut().for_each(|(_, why)| "asked with a token this says why".clone_into(why));
            }
            Err(Problem::not_ready(no_worker_detail(&workers, &failures)))
        }
    }
}

/// Explains why no worker is available; if none was discovered, with the causes.
fn no_worker_detail(workers: &[WorkerView], failures: &[(WorkerSource, String)]) -> String {
    /// Maximum number of causes shown.
    const MAX_CAUSES: usize = 4;
    let mut told = match workers {
        [_, ..] => "No worker answers. GET /ownerserve/v1/workers tells how each is.".to_owned(),
        [] => "No worker is listed: name one (--worker URL, [[workers]], [discovery]) or have it register itself \
                  (POST /ownerserve/v1/registrations)."
            .to_owned(),
    };
    for (source, why) in failures.iter().take(MAX_CAUSES) {
        let _ = write!(told, " Workers of {} cannot be looked up: {why}.", source.as_ref());
    }
    told
}

/// Metrics for Prometheus.
#[utoipa::path(get, path = "/metrics", tag = "process",
    responses((status = 200, description = "In Prometheus' text format.", body = String, content_type = "text/plain")))]
pub(super) async fn metrics(State(gateway): State<Arc<AppState>>) -> Response {
    gauges::refresh(&gateway);
    ([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], gateway.metrics.render()).into_response()
}
