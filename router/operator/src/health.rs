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
use super::gauges;
use super::guardrail;
use super::problem::Problem;
use super::sources::{FleetSources, OperatorParts};
use super::state::OperatorState;
use super::transfer_checks;
use proxy::adapters;
use proxy::auth::MAX_NAMED_TENANTS;
use proxy::discovery::WorkerSource;
use proxy::prefix_cache::tokenizer_drift::{DriftSignal, MismatchScope, TokenizerMismatch, advice};
use proxy::tenant_isolation::NotServingReason;

/// Whether the process lives.
#[utoipa::path(get, path = "/livez", tag = "process",
    responses((status = 200, description = "The process lives.", body = String, content_type = "text/plain")))]
pub(super) async fn live() -> &'static str {
    "ok\n"
}

/// Role of this node in the quorum.
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

/// What is wrong while requests are still served.
#[derive(Serialize, ToSchema)]
#[schema(as = Degraded)]
struct Degradation {
    /// `workers`, `ledger`, `shared_cache`, `prefix_cache`, `guardrail`, `transfer_check`, `audit_log`, `files`, `discovery`,
    /// `listeners`, `background_tasks`, `process`, `salts` or `tenants`.
    component: &'static str,
    /// Of the ledger `no_quorum`, `removed_from_cluster`, `log_write_failed`, `log_entries_lost` or `data_dir_missing`; of workers
    /// `all_draining`, `ejected` or `salts_ignored`; of the shared cache `slow`, `unreachable` or `other_secret`; of the prefix cache
    /// `disabled_by_verification`, `token_count_mismatch`, `cache_hit_mismatch`, `chat_template_invalid`, `adapter_not_configured`
    /// or `adapter_not_served`; of the guardrail `action_disabled` or `placement_slower`; of the transfer check
    /// `output_mismatch`; of the audit log `write_failed`; of files what the unreadable file holds; of discovery the source that
    /// failed; of listeners `unauthenticated` or `no_tls`; of background tasks `restarted`; of the process `resource_shortage`; of
    /// salts `salt_untold`; of tenants `quota_without_api_key`.
    reason: &'static str,
    /// What is wrong, in words. Names of workers, models, tenants and files, and errors, only for callers with a token.
    detail: String,
}

impl Degradation {
    /// Returns the same without names, paths and errors, for unauthenticated callers.
    fn redacted(self) -> Self {
        let what = match self.component {
            "workers" => "workers take no new sessions, or only trials, or nothing",
            "ledger" => "the ledger cannot be changed, or this node does not keep it",
            "shared_cache" => "Redis is not used, or not as it should be",
            "prefix_cache" => "prompts of a model are known less exactly than they could be",
            "guardrail" => "an action made sessions slower and is disabled",
            "transfer_check" => "a transfer over a link failed its check, so that the link is disabled",
            "audit_log" => "the audit log takes no line, so that operators' writes are refused",
            "files" => "a file that changed is not used, what was read before still is",
            "discovery" => "workers cannot be looked up, those that were found before stay",
            "listeners" => "a listener on the network lacks authentication or TLS",
            "tenants" => "quotas limit nobody, because no key names their tenants",
            "background_tasks" => "a background task ended in an error and was restarted",
            "process" => "the ledger waits for what this process lacks",
            "salts" => "whether engines keep tenants apart is not proven",
            _ => "something is not as it should be",
        };
        Self { detail: format!("{what}; send an operator token to see the details"), ..self }
    }

    fn of_ejected_workers(fleet: &FleetSources) -> Option<Self> {
        let workers = fleet.workers.fleet().snapshot();
        let outliers = fleet.outliers.lock();
        let describe =
            |view: &WorkerView| Some(format!("{} ({})", view.endpoint, outliers.ejection(view)?.reason.as_ref()));
        let ejected: Vec<_> = workers.iter().filter_map(describe).collect();
        (!ejected.is_empty()).then(|| Self {
            component: "workers",
            reason: "ejected",
            detail: format!("requests failed there, so that only trials go there for a while: {}", ejected.join(", ")),
        })
    }

    fn of_salts(fleet: &FleetSources) -> Option<Self> {
        if !fleet.isolation.keys().has_several_tenants() {
            return None;
        }
        let workers = fleet.workers.fleet().snapshot();
        let untold = workers.iter().filter(|view| fleet.isolation.salt_support().untold(view.id).is_some());
        let untold: Vec<_> = untold.map(|view| view.endpoint.to_string()).collect();
        (!untold.is_empty()).then(|| Self {
            component: "salts",
            reason: "salt_untold",
            detail: format!(
                "whether these engines honour cache_salt is not proven, because they do not tell cached tokens, so that tenants may \
                 find out what others have sent: {}; start vLLM with --enable-prompt-tokens-details",
                untold.join(", ")
            ),
        })
    }

    /// Reports workers whose engines ignore cache salts although tenants must be kept apart.
    fn of_ignored_salts(fleet: &FleetSources) -> Option<Self> {
        let barred = fleet.isolation.barred_workers();
        let workers: Vec<_> = barred.iter().filter_map(|id| fleet.workers.worker(*id)).collect();
        let endpoints: Vec<_> = workers.iter().map(|worker| worker.config.endpoint().as_ref()).collect();
        (!endpoints.is_empty()).then(|| Self {
            component: "workers",
            reason: "salts_ignored",
            detail: format!("{SALTS_IGNORED}: {}", endpoints.join(", ")),
        })
    }

    fn of_tokenizer_mismatch(fleet: &FleetSources, doubt: &TokenizerMismatch) -> Self {
        let endpoint = |worker: &WorkerId| {
            fleet
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
            DriftSignal::TokenCount => format!("prompts of {model} have other tokens at {at} than were computed here"),
            DriftSignal::CacheHit => format!(
                "of prompts of {model} more is found in the cache at {at} than KV events told of the tokens that were computed \
                 here: they are as many and other ones"
            ),
        };
        let detail = format!("{shows}, so that what workers hold of it is approximate {reach}; {}", advice(model));
        Self { component: "prefix_cache", reason: doubt.signal.into(), detail }
    }
}

/// Readiness of this router, and what is wrong meanwhile.
#[derive(Serialize, ToSchema)]
pub(super) struct Readiness {
    ready: bool,
    /// This node's id.
    node_id: u64,
    #[schema(inline)]
    role: QuorumRole,
    degraded: Vec<Degradation>,
}

impl Readiness {
    fn of(state: &OperatorState) -> Self {
        let parts = &*state.parts;
        let fleet = &parts.fleet;
        let directory = parts.ledger.directory();
        let own = directory.members().into_iter().find(|member| member.node == directory.node());
        let role = match own {
            _ if directory.is_removed() => QuorumRole::Removed,
            Some(own) if own.is_leader => QuorumRole::Leader,
            Some(own) if own.role == MemberRole::Voter => QuorumRole::Voter,
            _ => QuorumRole::Learner,
        };
        let ledger = parts.ledger.ledger_problems().into_iter();
        let ledger = ledger.map(|it| Degradation { component: "ledger", reason: it.into(), detail: it.to_string() });
        let redis = parts.shared_cache.degraded_health().map(|it| Degradation {
            component: "shared_cache",
            reason: it.into(),
            detail: format!("Redis is {}", it.as_ref()),
        });
        let secret = parts.shared_cache.has_other_secret().then(|| Degradation {
            component: "shared_cache",
            reason: "other_secret",
            detail:
                "another router of this namespace has another shared_cache.encryption_secret, so that neither reads what the other \
                     writes to Redis"
                    .into(),
        });
        let draining = fleet.workers.pool().ready(fleet.workers.fleet()).is_empty().then(|| Degradation {
            component: "workers",
            reason: "all_draining",
            detail:
                "every worker that answers is being drained: what comes is served there all the same, because nobody \
                     else can, and nothing new is owned; take a worker back, or add one"
                    .into(),
        });
        let ejected = Degradation::of_ejected_workers(fleet).into_iter().chain(Degradation::of_ignored_salts(fleet));
        let slower = guardrail::slower_action_details(&parts.routing).map(|(reason, detail)| Degradation {
            component: "guardrail",
            reason,
            detail,
        });
        let disabled_links = transfer_checks::disabled_link_details(&parts.routing.transfer_checks, fleet)
            .map(|detail| Degradation { component: "transfer_check", reason: "output_mismatch", detail });
        let audit = state.audit.is_broken().then(|| Degradation {
            component: "audit_log",
            reason: "write_failed",
            detail: "the audit log takes no line, so that operators' writes are refused".into(),
        });
        let files = parts.stale_files.reasons().into_iter().map(|(reason, why)| Degradation {
            component: "files",
            reason,
            detail: format!("a file that changed is not used, what was read before still is: {why}"),
        });
        let lookups = fleet.discovery.failures().into_iter().map(|(source, why)| Degradation {
            component: "discovery",
            reason: source.into(),
            detail: format!("{why}; the workers that were found before stay"),
        });
        let tasks = directory.supervision().recently_ended().into_iter().map(|task| Degradation {
            component: "background_tasks",
            reason: "restarted",
            detail: format!(
                "the background task {task} ended in an error of ours in the last five minutes, and was begun anew: the log has \
                 it; please report it"
            ),
        });
        let exposed = state.settings.exposed_listeners.iter().map(|it| Degradation {
            component: "listeners",
            reason: it.reason,
            detail: it.detail.into(),
        });
        let short = directory.resource_shortage().map(|what| Degradation {
            component: "process",
            reason: "resource_shortage",
            detail: format!("the ledger waits for what this process lacks: {what}"),
        });
        let degraded = draining
            .into_iter()
            .chain(ejected)
            .chain(ledger)
            .chain(redis)
            .chain(secret)
            .chain(Self::of_prefix_cache(parts))
            .chain(slower)
            .chain(disabled_links)
            .chain(audit)
            .chain(files)
            .chain(lookups)
            .chain(tasks)
            .chain(short)
            .chain(Degradation::of_salts(fleet))
            .chain(Self::of_tenants(state))
            .chain(exposed)
            .collect();
        Self { ready: true, node_id: directory.node().0, role, degraded }
    }

    /// Reports quotas that apply to no tenant, as after a misspelt name.
    fn of_tenants(state: &OperatorState) -> Option<Degradation> {
        let keys = state.parts.fleet.isolation.keys();
        let without = keys.tenants_without_key(state.settings.tenants.iter().map(String::as_str));
        let (first, more) = without.split_at(without.len().min(MAX_NAMED_TENANTS));
        let named = match more.len() {
            0 => first.join(", "),
            more => format!("{} and {more} more", first.join(", ")),
        };
        let detail = match keys.required() {
            true => format!(
                "no API key names these tenants, so their quotas have no effect: {named}; add keys to auth.keys_file, or remove \
                 their sections"
            ),
            false => format!(
                "without API keys every caller is the tenant \"default\", so the quotas of these tenants have no effect: {named}; \
                 set auth.keys_file, or remove their sections"
            ),
        };
        (!without.is_empty()).then_some(Degradation { component: "tenants", reason: "quota_without_api_key", detail })
    }

    /// Reports prompts that are known less precisely than possible.
    fn of_prefix_cache(parts: &OperatorParts) -> impl Iterator<Item = Degradation> {
        let identity = parts.catalog.disabled_by_spot_check().map(|model| Degradation {
            component: "prefix_cache",
            reason: "disabled_by_verification",
            detail: format!("prompts of {model} are computed as a whole: one that was put together differed"),
        });
        let templates = parts.catalog.bad_templates();
        let identity = identity.chain(templates.map(|bad| Degradation {
            component: "prefix_cache",
            reason: "chat_template_invalid",
            detail: bad.to_string(),
        }));
        let doubts = parts.fleet.tokenizer_drift.suspected_mismatches();
        let identity =
            identity.chain(doubts.into_iter().map(|doubt| Degradation::of_tokenizer_mismatch(&parts.fleet, &doubt)));
        let odd = adapters::mismatches(parts.fleet.workers.fleet(), &parts.catalog).into_iter();
        identity.chain(odd.map(|odd| Degradation {
            component: "prefix_cache",
            reason: odd.reason(),
            detail: odd.to_string(),
        }))
    }
}

/// Whether this router can serve clients: a worker answers, and the router does not shut down.
///
/// No token is needed. Where tokens are configured, only callers with one see workers' URLs, models, tenants, files and errors.
///
/// Problems of the ledger or of Redis, or that all workers drain, are reported and take no traffic away: steps are still
/// served, and every other router has the same problem.
#[utoipa::path(get, path = "/readyz", tag = "process",
    responses(
        (status = 200, description = "It can serve clients.", body = LedgerResponse<Readiness>),
        (status = 503, description = "No worker that answers may serve, or this router shuts down.")))]
pub(super) async fn ready(
    State(state): State<OperatorState>,
    headers: HeaderMap,
) -> Result<LedgerResponse<Readiness>, Problem> {
    let fleet = &state.parts.fleet;
    let is_stranger = state.tokens.authenticate(&headers).is_err();
    if state.is_shutting_down() {
        return Err(Problem::not_ready("This router is ending: what it began it brings to its end. Ask another one."));
    }
    match fleet.isolation.serving(&fleet.workers) {
        Ok(()) => {
            if state.audit.is_broken() {
                // The result shows in the next request: this one must not wait for the disk.
                let audit = state.audit.clone();
                drop(tokio::task::spawn_blocking(move || audit.probe_space()));
            }
            let mut readiness = Readiness::of(&state);
            if is_stranger {
                readiness.degraded = readiness.degraded.into_iter().map(Degradation::redacted).collect();
            }
            Ok(LedgerResponse::new(&state.parts.ledger.directory().view(), readiness))
        }
        Err(NotServingReason::SaltsIgnored) => {
            Err(Problem::not_ready(format!("No worker that answers may serve: {SALTS_IGNORED}.")))
        }
        Err(NotServingReason::NobodyAnswers) => {
            let (workers, mut failures) = (fleet.workers.fleet().snapshot(), fleet.discovery.failures());
            if is_stranger {
                failures.iter_mut().for_each(|(_, why)| "asked with a token this says why".clone_into(why));
            }
            Err(Problem::not_ready(no_worker_detail(&workers, &failures)))
        }
    }
}

/// Explains why no worker is available; if none was discovered, with the reasons.
fn no_worker_detail(workers: &[WorkerView], failures: &[(WorkerSource, String)]) -> String {
    /// Maximum number of reasons shown.
    const MAX_REASONS: usize = 4;
    let mut detail = match workers {
        [_, ..] => "No worker answers. GET /ownerserve/v1/workers tells how each is.".to_owned(),
        [] => "No worker is listed: name one (--worker URL, [[workers]], [discovery]) or have it register itself \
                  (POST /ownerserve/v1/registrations)."
            .to_owned(),
    };
    for (source, why) in failures.iter().take(MAX_REASONS) {
        let _ = write!(detail, " Workers of {} cannot be looked up: {why}.", source.as_ref());
    }
    detail
}

/// Metrics for Prometheus.
#[utoipa::path(get, path = "/metrics", tag = "process",
    responses((status = 200, description = "Metrics in Prometheus' text format.", body = String, content_type = "text/plain")))]
pub(super) async fn metrics(State(parts): State<Arc<OperatorParts>>) -> Response {
    gauges::refresh(&parts);
    ([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], parts.metrics.render()).into_response()
}
