//! Model catalog: what is known of the served models, which is tokenizer and template, KV shape and block size. Loaded
//! once, at start.

mod attention;

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use lru::LruCache;
use ownership::ledger::{KvBlockSpec, KvFormatDigest, KvKinds, Scope};
use parking_lot::Mutex;
use planner::AttentionSpec;
use prefix::{
    ModelTokenizer, ModelTokenizerSource, PrefixError, PromptResolver, PromptResolverOptions, PromptWorkLimits,
    TemplateFault,
};
use serde::Deserialize;
use vocabulary::{Bytes, HashSeed, ModelId, ModelNamespace, RequestNamespace, TenantId, Tokens};
use workers_shim::sim::EngineProfile;
use xxhash_rust::xxh3::xxh3_64;

pub use attention::AttentionError;
pub use attention::load_spec;

/// Tokens per chain block where nothing else is configured; divides the block size of every common engine setting.
pub const DEFAULT_BLOCK_TOKENS: Tokens = Tokens(16);
/// KV bytes per token where there is no `config.json`: an 8B model with grouped-query attention, in 16 bits.
const DEFAULT_KV_BYTES: Bytes = Bytes(128 << 10);
/// Value of `models.NAME.tokenizer_dir` for the small model of the simulated workers.
const BUILT_IN: &str = "builtin";

/// One model as known to the router.
#[derive(Debug)]
pub struct Model {
    /// Computes the block hashes of its prompts.
    pub identifier: PromptResolver,
    /// Format and size of its KV blocks.
    pub shape: KvBlockSpec,
    /// KV bytes per token.
    pub kv_bytes_per_token: Bytes,
    /// State that its layers keep, where that is known.
    pub attention: Option<Arc<AttentionSpec>>,
    /// The LoRA adapter that its name stands for; everything else belongs to the base model.
    adapter: Option<ModelId>,
    /// Whether a spot check has disabled its prefix cache. Shared with its adapters, whose prompts are rendered the
    /// same way.
    disabled_by_spot_check: Arc<AtomicBool>,
    /// Directory of its tokenizer and template, as configured.
    folder: Option<PathBuf>,
}

/// A chat template that renders nothing of the messages, or fails: the model's conversations are identified by their
/// bytes.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "the chat template of model {model}, from {}, {fault} on a probe conversation: its conversations are known by their \
     bytes only (approximate); put the template that the engines use there, or point models.{name:?}.tokenizer_dir at the \
     folder that they load, and start the router again", file.display(), name = &*model.0
)]
pub struct BadTemplate {
    /// The model.
    pub model: ModelId,
    /// The template's file.
    pub file: PathBuf,
    /// What is wrong with it.
    pub fault: TemplateFault,
}

impl Model {
    /// Returns the scope within which prefixes of a tenant are shared.
    pub fn scope(&self, tenant: &TenantId) -> Scope {
        Scope::of(tenant, self.shape.format)
    }

    /// Has prompts computed as a whole from now on. Returns whether that was not so before.
    pub fn disable_by_spot_check(&self) -> bool {
        !self.disabled_by_spot_check.swap(true, Ordering::Relaxed)
    }

    /// Whether a spot check found that a prompt extended from an earlier step differed from the whole one.
    pub fn is_disabled_by_spot_check(&self) -> bool {
        self.disabled_by_spot_check.load(Ordering::Relaxed)
    }

    /// Returns what block hashes depend on besides tokens, named as engines name it.
    pub fn root_keys<'a>(&'a self, salt: Option<&'a str>) -> RequestNamespace<'a> {
        RequestNamespace { adapter: self.adapter.as_ref().map(|name| &*name.0), salt, content: None }
    }

    /// Returns the same model with this adapter.
    fn with_adapter(&self, model: &ModelId) -> Self {
        let format = format_of(model, self.kv_bytes_per_token);
        Self {
            identifier: self.identifier.clone(),
            shape: KvBlockSpec { format, ..self.shape },
            kv_bytes_per_token: self.kv_bytes_per_token,
            attention: self.attention.clone(),
            adapter: Some(model.clone()),
            disabled_by_spot_check: self.disabled_by_spot_check.clone(),
            folder: self.folder.clone(),
        }
    }

    fn new(model: &ModelId, config: &ModelConfig, known: LoadedModelFiles) -> Self {
        let LoadedModelFiles { text, attention } = known;
        let block = config.block_size.map_or(DEFAULT_BLOCK_TOKENS, |block| Tokens(block.into()));
        let revision: Arc<str> = config.revision.as_deref().unwrap_or_default().into();
        let namespace = ModelNamespace { model: model.clone(), revision, tokenizer: "".into() };
        let options = PromptResolverOptions {
            namespace,
            seed: HashSeed::default(),
            block_size: block,
            text,
            limits: PromptWorkLimits::default(),
        };
        let bytes = match &attention {
            Some(spec) => spec.bytes_per_token(),
            None => config.tokenizer_dir.as_deref().and_then(built_in_kv_bytes).unwrap_or(DEFAULT_KV_BYTES),
        };
        let kinds = attention.as_deref().map_or_else(KvKinds::default, attention::ledger_kinds);
        let shape = KvBlockSpec { format: format_of(model, bytes), kinds, block, block_bytes: bytes * block.0 };
        Self {
            identifier: PromptResolver::new(options),
            shape,
            kv_bytes_per_token: bytes,
            attention,
            adapter: None,
            disabled_by_spot_check: Arc::default(),
            folder: config.tokenizer_dir.clone(),
        }
    }
}

/// What was loaded from a model's files.
#[derive(Default)]
struct LoadedModelFiles {
    text: Option<Arc<ModelTokenizer>>,
    attention: Option<Arc<AttentionSpec>>,
}

/// A model whose files cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CatalogError {
    /// The tokenizer or the template is invalid.
    #[error("models.{name}.tokenizer_dir: {source}")]
    Text {
        /// The model.
        name: String,
        /// What is wrong.
        source: PrefixError,
    },
    /// The description of its KV is invalid.
    #[error("models.{name}.attention_file: {source}")]
    Attention {
        /// The model.
        name: String,
        /// What is wrong, and what is accepted.
        source: AttentionError,
    },
}

/// Maximum number of models without a configuration that are kept: clients choose their names.
const MAX_UNCONFIGURED: NonZeroUsize = NonZeroUsize::new(64).expect("not zero");
/// Maximum length of their names, in bytes.
const MAX_KEPT_NAME: usize = 256;

/// All configured models.
#[derive(Debug)]
pub struct Catalog {
    models: BTreeMap<ModelId, Arc<Model>>,
    /// Models that clients have named and nobody has configured.
    unconfigured: Mutex<LruCache<ModelId, Arc<Model>>>,
}

impl Default for Catalog {
    fn default() -> Self {
        Self { models: BTreeMap::new(), unconfigured: Mutex::new(LruCache::new(MAX_UNCONFIGURED)) }
    }
}

impl Catalog {
    /// Loads tokenizer, template and attention specification of every configured model.
    pub fn load(configs: &BTreeMap<String, ModelConfig>) -> Result<Self, CatalogError> {
        let mut models = BTreeMap::new();
        for (name, config) in configs {
            let text = config.tokenizer_dir.as_deref().map(load_text).transpose();
            let text = text.map_err(|source| CatalogError::Text { name: name.clone(), source })?.map(Arc::new);
            let id = ModelId::from(name.as_str());
            let attention = attention::load(&id, config);
            let attention = attention.map_err(|source| CatalogError::Attention { name: name.clone(), source })?;
            let model = Model::new(&id, config, LoadedModelFiles { text, attention });
            for name in &config.lora_adapters {
                let name = ModelId::from(name.as_str());
                models.insert(name.clone(), Arc::new(model.with_adapter(&name)));
            }
            models.insert(id, Arc::new(model));
        }
        Ok(Self { models, ..Self::default() })
    }

    /// Returns the model of this name; prompts of one that is not configured are identified by their bytes only.
    pub fn model(&self, name: &ModelId) -> Arc<Model> {
        match self.models.get(name) {
            Some(model) => model.clone(),
            None => self.unconfigured_model(name),
        }
    }

    fn unconfigured_model(&self, name: &ModelId) -> Arc<Model> {
        if let Some(model) = self.unconfigured.lock().get(name) {
            return model.clone();
        }
        let model = Arc::new(Model::new(name, &ModelConfig::default(), LoadedModelFiles::default()));
        if name.0.len() <= MAX_KEPT_NAME {
            // Freed after the lock is released.
            let _evicted = self.unconfigured.lock().push(name.clone(), model.clone());
        }
        model
    }

    /// Returns the configured adapters, each with its base model.
    pub fn adapters(&self) -> impl Iterator<Item = (&ModelId, &ModelId)> {
        let adapted = self.models.iter().filter(|(_, model)| model.adapter.is_some());
        adapted.map(|(name, model)| (name, &model.identifier.namespace().model))
    }

    /// Returns the models whose prefix cache a spot check has disabled.
    pub fn disabled_by_spot_check(&self) -> impl Iterator<Item = &ModelId> {
        self.models.iter().filter(|(_, model)| model.is_disabled_by_spot_check()).map(|(name, _)| name)
    }

    /// Returns the unusable chat templates. Adapters are skipped, because they use their base model's.
    pub fn bad_templates(&self) -> impl Iterator<Item = BadTemplate> {
        self.models.iter().filter(|(_, model)| model.adapter.is_none()).filter_map(|(name, model)| {
            let text = model.identifier.text()?;
            let file = model.folder.clone().unwrap_or_default().join(text.template_file());
            Some(BadTemplate { model: name.clone(), file, fault: text.template_fault()?.clone() })
        })
    }

    /// Returns the attention specification of each model and adapter, where it is known.
    pub fn attention(&self) -> BTreeMap<ModelId, AttentionSpec> {
        let known = |(name, model): (&ModelId, &Arc<Model>)| {
            Some((name.clone(), AttentionSpec::clone(model.attention.as_ref()?)))
        };
        self.models.iter().filter_map(known).collect()
    }

    /// Returns the models with a tokenizer and without a chat template, with their directories. That is right for
    /// models that serve completions only.
    pub fn models_without_template(&self) -> impl Iterator<Item = (&ModelId, &Path)> {
        let own = self.models.iter().filter(|(_, model)| model.adapter.is_none());
        own.filter(|(_, model)| model.identifier.text().is_some_and(|text| !text.has_template()))
            .map(|(name, model)| (name, model.folder.as_deref().unwrap_or(Path::new(""))))
    }

    /// Returns the model of this name, if it is configured.
    pub fn configured_model(&self, model: &ModelId) -> Option<&Arc<Model>> {
        self.models.get(model)
    }
}

fn format_of(model: &ModelId, kv_bytes_per_token: Bytes) -> KvFormatDigest {
    KvFormatDigest(xxh3_64(format!("{model} {kv_bytes_per_token}").as_bytes()))
}

/// Loads the small model of the simulated workers.
pub fn built_in_text() -> Result<ModelTokenizer, PrefixError> {
    ModelTokenizer::load(ModelTokenizerSource::Files(prefix::ModelFiles {
        tokenizer_json: include_bytes!("../../../configs/models/tiny/tokenizer.json").as_slice().into(),
        tokenizer_config: Some(include_bytes!("../../../configs/models/tiny/tokenizer_config.json").as_slice().into()),
        chat_template: Some(include_bytes!("../../../configs/models/tiny/chat_template.jinja").as_slice().into()),
        config: Some(include_bytes!("../../../configs/models/tiny/config.json").as_slice().into()),
        ..prefix::ModelFiles::default()
    }))
}

fn load_text(folder: &Path) -> Result<ModelTokenizer, PrefixError> {
    match folder.to_str() {
        Some(BUILT_IN) => built_in_text(),
        _ => ModelTokenizer::load(ModelTokenizerSource::Folder(folder.to_owned())),
    }
}

/// Returns the KV size of the simulated engines: the built-in model's text is small, but they hold blocks like a large
/// model's.
fn built_in_kv_bytes(folder: &Path) -> Option<Bytes> {
    (folder.to_str() == Some(BUILT_IN)).then(|| EngineProfile::default().kv_size_per_token)
}

#[cfg(test)]
pub(crate) mod tests {
    use prefix::{ExtraPromptInputs, PromptIdentity};

    use super::*;

    /// A copy of the built-in model's directory with this template.
    pub(crate) fn folder_with_template(template: &str) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/models/tiny");
        for file in ["tokenizer.json", "tokenizer_config.json"] {
            std::fs::copy(source.join(file), folder.path().join(file)).unwrap();
        }
        std::fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
        folder
    }

    #[test]
    fn an_unusable_chat_template_is_reported_with_model_file_and_setting() {
        let (empty, fails) = (folder_with_template(""), folder_with_template("{{ raise_exception('no such luck') }}"));
        let fine = folder_with_template("{% for m in messages %}{{ m.content | upper }}{% endfor %}");
        let of = |folder: &tempfile::TempDir| ModelConfig {
            tokenizer_dir: Some(folder.path().into()),
            lora_adapters: vec![format!("adapter of {}", folder.path().display())],
            ..ModelConfig::default()
        };
        let configs = [("a/b", of(&empty)), ("c", of(&fails)), ("d", of(&fine))];
        let catalog = Catalog::load(&configs.map(|(name, config)| (name.to_owned(), config)).into()).unwrap();
        let messages: Vec<String> = catalog.bad_templates().map(|bad| bad.to_string()).collect();
        let [empty_told, fails_told] = &messages[..] else { panic!("{messages:?}") };
        let file = empty.path().join("chat_template.jinja").display().to_string();
        let begins = format!("the chat template of model a/b, from {file}, renders nothing on a probe conversation");
        assert!(empty_told.starts_with(&begins) && empty_told.contains("models.\"a/b\".tokenizer_dir"), "{empty_told}");
        assert!(fails_told.contains("fails with") && fails_told.contains("no such luck"), "{fails_told}");
    }

    #[test]
    fn an_adapter_shares_its_models_tokens_under_a_different_root() {
        let config = ModelConfig {
            tokenizer_dir: Some(BUILT_IN.into()),
            lora_adapters: vec!["sql".into()],
            ..ModelConfig::default()
        };
        let catalog = Catalog::load(&BTreeMap::from([("tiny".to_owned(), config)])).unwrap();
        let of = |name: &str| catalog.model(&name.into());
        let prompt = |name: &str, salt| {
            let (model, body) = (of(name), br#"{"messages":[{"role":"user","content":"What is in the sea?"}]}"#);
            model
                .identifier
                .resolve_chat(body, ExtraPromptInputs { keys: model.root_keys(salt), ..ExtraPromptInputs::default() })
        };
        let (plain, adapted) = (prompt("tiny", None), prompt("sql", None));
        assert_eq!((plain.identity, adapted.identity), (PromptIdentity::Exact, PromptIdentity::Exact));
        assert_eq!(plain.content, adapted.content);
        assert!(plain.chain.ids.iter().all(|id| !adapted.chain.ids.contains(id)));
        // As the index computes roots for an engine's blocks with this adapter.
        let keys = RequestNamespace { adapter: Some("sql"), salt: Some("s"), content: None };
        let namespace = of("tiny").identifier.namespace().clone();
        assert_eq!(prompt("sql", Some("s")).chain.root, namespace.root(of("tiny").identifier.seed(), keys));
        assert_ne!(of("sql").shape.format, of("tiny").shape.format);
        assert!(of("csv").identifier.text().is_none(), "an adapter that nobody configured is known by its bytes");
    }
}

/// Section `[models.NAME]`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ModelConfig {
    /// Folder with `tokenizer.json`, chat template and `config.json`. Without it prompts are identified by their bytes.
    pub tokenizer_dir: Option<PathBuf>,
    /// File that describes what its layers keep, in place of `config.json`; see `planner`'s `AttentionSpec`.
    pub attention_file: Option<PathBuf>,
    /// Bits of a number in the engines' KV cache, where that is not the weights' width: `--kv-cache-dtype fp8` is 8.
    pub kv_cache_bits: Option<u32>,
    /// Tokens a chain block; must divide the block size of every engine that serves the model.
    pub block_size: Option<u32>,
    /// Revision of the weights, where several are in use.
    pub revision: Option<String>,
    /// LoRA adapters of it, by the names that the engines serve them under.
    pub lora_adapters: Vec<String>,
}
