//! The configuration, cut into the settings of each part.

use super::Config;
use proxy::caches::CacheSettings;
use proxy::host_check::{CallerAuthentication, HostRules};
use proxy::pipeline::plan::PlannerStateConfig;
use proxy::stored_responses::TenantMode;

/// Returns what the clients' listener accepts.
pub(crate) fn client_host_rules(config: &Config) -> HostRules {
    let callers = match &config.auth.keys_file {
        Some(_) => CallerAuthentication::Authenticated,
        None => CallerAuthentication::Anonymous { setting: "auth.keys_file" },
    };
    HostRules { config: config.server.clone(), callers, scheme: config.client_scheme() }
}

/// Returns the settings of the caches.
pub(crate) fn cache_settings(config: &Config) -> CacheSettings<'_> {
    CacheSettings {
        shared_cache: &config.shared_cache,
        prefix_cache: &config.prefix_cache,
        tenants: &config.tenants,
        tenancy: if config.auth.keys_file.is_some() { TenantMode::Several } else { TenantMode::Single },
    }
}

/// Returns the settings of the planner's state.
pub(crate) fn routing_policy_settings(config: &Config) -> PlannerStateConfig<'_> {
    PlannerStateConfig {
        planner: &config.planner,
        retries: config.retries,
        prefix_replication: config.prefix_replication,
    }
}
