//! LoRA adapters: compares the engines' lists with `models.NAME.lora_adapters`. Steps for an adapter that only engines
//! list are identified by their bytes, even if all else is known; one that only the configuration lists is probably a
//! typo.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Display};
use std::sync::Arc;
use std::time::Duration;

use vocabulary::{ModelId, WorkerView};
use workers_shim::fleet::Fleet;

use crate::catalog::Catalog;

/// Time between two checks.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum number of adapter names in a report about one model.
const MAX_NAMES: usize = 16;

/// Adapters of one model that are listed by the engines or the configuration, but not by both.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct AdapterListMismatch {
    base: ModelId,
    adapters: BTreeSet<ModelId>,
    source: AdapterSource,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum AdapterSource {
    Engines,
    Configuration,
}

impl AdapterListMismatch {
    /// Returns the reason for `/readyz` and alarms.
    pub fn reason(&self) -> &'static str {
        match self.source {
            AdapterSource::Engines => "adapter_not_configured",
            AdapterSource::Configuration => "adapter_not_served",
        }
    }
}

impl Display for AdapterListMismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { base, adapters: names, source: told } = self;
        let shown: Vec<String> = names.iter().take(MAX_NAMES).map(|name| format!("{:?}", &*name.0)).collect();
        let more = match names.len().saturating_sub(MAX_NAMES) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let (shown, setting) = (shown.join(", "), format!("models.{:?}.lora_adapters", &*base.0));
        match told {
            AdapterSource::Engines => write!(
                f,
                "engines list LoRA adapters on top of {base} that are not configured here: their prompts are known by their \
                 bytes only (approximate); add {shown}{more} to {setting} and start the router again"
            ),
            AdapterSource::Configuration => write!(
                f,
                "{setting} names {shown}{more}, which no engine lists: see under which names GET /v1/models of the engines has \
                 them (--lora-modules), and load or rename them"
            ),
        }
    }
}

/// Returns the current mismatches. Engines that have not reported their models yet may serve anything.
pub fn mismatches(workers: &Fleet, catalog: &Catalog) -> Vec<AdapterListMismatch> {
    let fleet = workers.snapshot();
    let mut all: BTreeMap<(ModelId, AdapterSource), BTreeSet<ModelId>> = BTreeMap::new();
    for worker in fleet.iter() {
        for adapter in workers.adapters(worker.id).iter() {
            let is_read = catalog.configured_model(&adapter.base).is_some_and(|base| base.identifier.text().is_some());
            if is_read && worker.models.contains(&adapter.name) && catalog.configured_model(&adapter.name).is_none() {
                all.entry((adapter.base.clone(), AdapterSource::Engines)).or_default().insert(adapter.name.clone());
            }
        }
    }
    let lists = |worker: &WorkerView, model: &ModelId| worker.models.contains(model);
    let are_known = fleet.iter().all(|worker| !worker.models.is_empty());
    for (name, base) in catalog.adapters().filter(|_| are_known) {
        if fleet.iter().any(|worker| lists(worker, base)) && !fleet.iter().any(|worker| lists(worker, name)) {
            all.entry((base.clone(), AdapterSource::Configuration)).or_default().insert(name.clone());
        }
    }
    all.into_iter().map(|((base, told), names)| AdapterListMismatch { base, adapters: names, source: told }).collect()
}

/// Logs each mismatch once.
pub async fn watch_mismatches(workers: Arc<Fleet>, catalog: Arc<Catalog>) {
    let mut before = Vec::new();
    loop {
        let now = mismatches(&workers, &catalog);
        now.iter().filter(|odd| !before.contains(*odd)).for_each(|odd| tracing::warn!("{odd}"));
        before = now;
        tokio::time::sleep(CHECK_INTERVAL).await;
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use vocabulary::KvIndexState;

    use super::*;
    use crate::lab::sim_command::tests::{sim, url};
    use crate::testing::{TestRouter, get, post, start_router_at, wait_until};

    async fn reasons(router: &TestRouter) -> Vec<(Value, String)> {
        let ready = get(router.operator_address(), "/readyz").await.json();
        let lines = ready["degraded"].as_array().unwrap();
        lines.iter().map(|line| (line["reason"].clone(), line["detail"].as_str().unwrap().to_owned())).collect()
    }

    #[tokio::test]
    async fn mismatched_adapters_are_reported_with_the_setting_to_change() {
        let worker = sim(&["--speed-up=50", "--lora-adapter=sql", "--lora-adapter=poet", "--lora-adapter=bard"]).await;
        let settings = ["models.tiny.tokenizer_dir=builtin", "models.tiny.lora_adapters=[\"sql\", \"peot\"]"];
        let router = start_router_at(&[url(&worker)], &settings).await;
        let told = reasons(&router).await;
        let [(unnamed, add), (unserved, rename)] = &told[..] else { panic!("{told:?}") };
        assert_eq!((unnamed, unserved), (&json!("adapter_not_configured"), &json!("adapter_not_served")));
        assert!(add.contains("add \"bard\", \"poet\" to models.\"tiny\".lora_adapters"), "{add}");
        assert!(rename.contains("models.\"tiny\".lora_adapters names \"peot\", which no engine lists"), "{rename}");
        wait_until("its events are followed", || {
            router.gateway.fleet().snapshot()[0].kv_index_state == KvIndexState::Exact
        })
        .await;
        let fallback = async |model: &str| {
            let body = json!({"model": model, "max_tokens": 2, "prompt": "what is in the sea?"}).to_string();
            assert_eq!(post(router.proxy_address(), "/v1/completions", body).await.status, 200);
            router.gateway.decisions.receipts.newest(1, |_| true)[0].lookup.token_ids_unavailable
        };
        assert_eq!([fallback("sql").await, fallback("poet").await], [None, Some("no_tokenizer")]);
    }

    #[tokio::test]
    async fn matching_adapters_and_models_without_a_tokenizer_report_no_mismatch() {
        let worker = sim(&["--lora-adapter=sql"]).await;
        let router = start_router_at(
            &[url(&worker)],
            &["models.tiny.tokenizer_dir=builtin", "models.tiny.lora_adapters=[\"sql\"]"],
        )
        .await;
        assert_eq!(reasons(&router).await, []);
        let unread = start_router_at(&[url(&worker)], &[]).await;
        assert_eq!(reasons(&unread).await, []);
        // It is unknown what a worker serves that was never reached.
        let elsewhere =
            start_router_at(&[], &["models.tiny.tokenizer_dir=builtin", "models.tiny.lora_adapters=[\"peot\"]"]).await;
        assert_eq!(mismatches(elsewhere.gateway.fleet(), elsewhere.gateway.catalog()), []);
    }

    #[test]
    fn mismatch_report_names_the_first_adapters_and_counts_the_rest() {
        let names = (0..20).map(|n| ModelId::from(format!("a{n:02}").as_str())).collect();
        let said =
            AdapterListMismatch { base: "m".into(), adapters: names, source: AdapterSource::Engines }.to_string();
        assert!(said.contains("\"a15\" and 4 more to models.\"m\".lora_adapters") && !said.contains("a16"), "{said}");
    }
}
