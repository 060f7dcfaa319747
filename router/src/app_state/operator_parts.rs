//! What the operator API gets: its settings from the configuration, and its handles from the router's state.

use super::AppState;
use crate::config::Config;
use crate::exposure::exposures;
use crate::operator::{FleetSources, OperatorParts, OperatorSettings, RoutingSources, SessionMover};
use proxy::host_check::{CallerAuthentication, HostRules};

/// Returns the settings of the operator API.
pub(crate) fn operator_settings(config: &Config) -> OperatorSettings {
    let callers = match &config.operator.tokens_file {
        Some(_) => CallerAuthentication::Authenticated,
        None => CallerAuthentication::Anonymous { setting: "operator.tokens_file" },
    };
    OperatorSettings {
        tokens_file: config.operator.tokens_file.clone(),
        audit_folder: config.ledger.data_dir.join("audit"),
        max_audit_log_size: config.operator.max_audit_log_size.0 as u64,
        drain_bandwidth: config.drain.bandwidth.0 as u64,
        transfer_check_sampling: config.transfer_check.sample_every,
        tenants: config.tenants.keys().cloned().collect(),
        exposed_listeners: exposures(config),
        host_rules: HostRules { config: config.server.clone(), callers, scheme: config.operator_scheme() },
    }
}

impl AppState {
    /// Returns the handles of the operator API.
    pub(crate) fn operator_parts(&self) -> OperatorParts {
        let (ledger, composition, decisions) = (&self.ledger, &self.composition, &self.decisions);
        OperatorParts {
            ledger: ledger.clone(),
            fleet: FleetSources {
                workers: self.workers.clone(),
                discovery: self.discovery().clone(),
                outliers: self.policies.outliers.clone(),
                isolation: self.isolation.clone(),
                tokenizer_drift: self.caches.prefix_cache.tokenizer_drift.clone(),
                calibration: decisions.calibration.clone(),
            },
            routing: RoutingSources {
                live: self.routing.clone(),
                decisions: decisions.clone(),
                guardrail: decisions.guardrail.clone(),
                transfer_checks: decisions.transfer_checks.clone(),
                occupancy: self.policies.occupancy().clone(),
            },
            sessions: SessionMover {
                ledger: ledger.clone(),
                fleet: composition.fleet.clone(),
                catalog: composition.catalog.clone(),
                prompts: self.caches.prompts.clone(),
                prefixes: self.prefix_mover.clone(),
                transfer_checks: decisions.transfer_checks.clone(),
                exchange_metrics: self.metrics.exchange.clone(),
                discovery_metrics: self.metrics.process.discovery.clone(),
            },
            catalog: composition.catalog.clone(),
            index: composition.index.clone(),
            prefix_cache: self.caches.prefix_cache.clone(),
            shared_cache: self.caches.shared_cache.clone(),
            stale_files: self.stale_files().clone(),
            memory_budget: self.operator_memory.clone(),
            offload_pool: self.offload_pool.clone(),
            metrics: self.metrics.clone(),
        }
    }
}
