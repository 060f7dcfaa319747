//! Compares each step of recorded sessions with `transformers`: computed in full, from checkpoints, and extended from
//! the previous step. Shared by the test over the committed dialogues and by the example that checks whole trace
//! folders.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use prefix::{
    ChatBodyLayout, ChatEndpoint, ConversationCache, ConversationQuery, ExtraPromptInputs, FallbackReason,
    ModelTokenizer, ModelTokenizerSource, PromptIdentity, PromptResolver, PromptResolverOptions, PromptWorkLimits,
    TokenCheckpoint, WallTime,
};
use serde::Deserialize;
use serde_json::value::RawValue;
use vocabulary::{Bytes, HashSeed, ModelNamespace, Tokens};

/// Digests of the token ids of `transformers`, by model and by the session's index in its file.
#[derive(Deserialize)]
pub(crate) struct SessionGoldens {
    now: i64,
    tools: Option<Box<RawValue>>,
    models: BTreeMap<String, BTreeMap<usize, Vec<Option<IdsDigest>>>>,
}

/// Number of ids, and their FNV-1a hash as little-endian 32-bit numbers, in hexadecimal.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
pub(crate) struct IdsDigest(usize, String);

impl IdsDigest {
    pub(crate) fn of(ids: &[u32]) -> Self {
        let bytes = ids.iter().flat_map(|id| id.to_le_bytes());
        let fnv =
            bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
        Self(ids.len(), format!("{fnv:016x}"))
    }
}

/// Messages of a session, and which of them each step sent; without `steps`, all messages before each assistant
/// message.
#[derive(Deserialize)]
struct RecordedSession {
    traj: Vec<Box<RawValue>>,
    steps: Option<Vec<Vec<usize>>>,
}

#[derive(Deserialize)]
struct RecordedRole<'a> {
    role: &'a str,
}

impl RecordedSession {
    fn steps(&self) -> Vec<Vec<usize>> {
        let answers =
            |at: &usize| serde_json::from_str::<RecordedRole<'_>>(self.traj[*at].get()).unwrap().role == "assistant";
        let before_answers = || (1..self.traj.len()).filter(answers).map(|at| (0..at).collect()).collect();
        self.steps.clone().unwrap_or_else(before_answers)
    }

    fn body(&self, step: &[usize], tools: Option<&RawValue>) -> String {
        let messages: Vec<&str> = step.iter().map(|at| self.traj[*at].get()).collect();
        let tools = tools.map_or("null", RawValue::get);
        format!("{{\"model\":\"m\",\"tools\":{tools},\"messages\":[{}]}}", messages.join(","))
    }
}

/// Counts of what was checked, and the differences.
#[derive(Default)]
pub(crate) struct CheckReport {
    pub(crate) steps: usize,
    pub(crate) refused: usize,
    pub(crate) tokens: u64,
    /// Tokens reused from checkpoints.
    pub(crate) reused: u64,
    /// Steps extended from the previous one, and the tokens reused from it.
    pub(crate) extended: (usize, u64),
    /// Steps that are not exact only because of the limit on endless words.
    pub(crate) too_large: usize,
    pub(crate) differences: Vec<String>,
}

impl std::ops::AddAssign for CheckReport {
    fn add_assign(&mut self, more: Self) {
        self.steps += more.steps;
        self.refused += more.refused;
        self.tokens += more.tokens;
        self.reused += more.reused;
        self.extended.0 += more.extended.0;
        self.extended.1 += more.extended.1;
        self.too_large += more.too_large;
        self.differences.extend(more.differences);
    }
}

/// Returns a model's folder by its name in the goldens.
pub(crate) fn folder(model: &str) -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    match model {
        "tiny" => here.join("../../configs/models/tiny"),
        _ => here.join("testdata/models").join(model),
    }
}

/// Checks every step of the sessions, for every model of the goldens.
pub(crate) fn check(sessions: &Path, goldens: &Path) -> BTreeMap<String, CheckReport> {
    let sessions = read_sessions(sessions);
    let goldens: SessionGoldens = serde_json::from_slice(&std::fs::read(goldens).unwrap()).unwrap();
    let now = WallTime { unix_seconds: goldens.now };
    let check_model = |(model, expected): (&String, &BTreeMap<usize, Vec<Option<IdsDigest>>>)| {
        let identifier = identifier(model);
        let mut checked = CheckReport::default();
        for (at, steps) in expected {
            let inputs = ExtraPromptInputs { now, ..ExtraPromptInputs::default() };
            let conversations = ConversationCache::new(Bytes(64 << 20));
            // Every other client names its sessions.
            let session = (at % 2 == 0).then_some(*at as u128);
            let mut run =
                SessionReplay { identifier: &identifier, asked: inputs, known: None, trails: conversations, session };
            for (n, (step, expected)) in sessions[*at].steps().iter().zip(steps).enumerate() {
                let body = sessions[*at].body(step, goldens.tools.as_deref());
                run.step(&body, expected.as_ref(), &mut checked, || format!("{model}, session {at}, step {n}"));
            }
        }
        (model.clone(), checked)
    };
    goldens.models.iter().map(check_model).collect()
}

fn read_sessions(path: &Path) -> Vec<RecordedSession> {
    let mut json = Vec::new();
    flate2::read::GzDecoder::new(std::fs::File::open(path).unwrap()).read_to_end(&mut json).unwrap();
    serde_json::from_slice(&json).unwrap()
}

fn identifier(model: &str) -> PromptResolver {
    let text = ModelTokenizer::load(ModelTokenizerSource::Folder(folder(model))).unwrap();
    let namespace = ModelNamespace { model: model.into(), revision: "".into(), tokenizer: "".into() };
    PromptResolver::new(PromptResolverOptions {
        namespace,
        seed: HashSeed(7),
        block_size: Tokens(16),
        text: Some(Arc::new(text)),
        limits: PromptWorkLimits::default(),
    })
}

/// One session being replayed.
struct SessionReplay<'a> {
    identifier: &'a PromptResolver,
    asked: ExtraPromptInputs<'a>,
    known: Option<TokenCheckpoint>,
    trails: ConversationCache,
    session: Option<u128>,
}

impl SessionReplay<'_> {
    fn step(&mut self, body: &str, expected: Option<&IdsDigest>, checked: &mut CheckReport, name: impl Fn() -> String) {
        checked.steps += 1;
        let full = self.identifier.resolve_chat(body.as_bytes(), self.asked);
        let from = self.identifier.resolve_conversation(
            ChatEndpoint::Chat,
            body.as_bytes(),
            (self.asked, self.known.as_ref()),
        );
        if from.prompt != full {
            checked.differences.push(format!("{}: from a checkpoint it is another prompt", name()));
        }
        checked.reused += from.reused_tokens.0;
        self.known = from.next_checkpoint.or(self.known.take());
        let layout = ChatBodyLayout::read(body.as_bytes()).expect("a chat body with messages");
        let memory = ConversationQuery { cache: &self.trails, tenant: "recorded", session: self.session };
        match self.identifier.extend(layout, self.asked, memory) {
            Some(grown) => {
                checked.extended.0 += 1;
                checked.extended.1 += grown.reused_tokens.0;
                if let Some(difference) = grown.prompt.mismatch(&full) {
                    let (name, tier) = (name(), grown.tier.as_ref());
                    checked.differences.push(format!("{name}: grown by {tier} it is another prompt: {difference:?}"));
                }
            }
            None => drop(self.identifier.resolve_and_cache(layout, self.asked, None, memory)),
        }
        match (full.token_ids(), expected) {
            (Some(ids), Some(expected)) if IdsDigest::of(ids) == *expected => checked.tokens += ids.len() as u64,
            (None, None) => checked.refused += 1,
            (None, Some(_)) if full.identity == PromptIdentity::Fallback(FallbackReason::TooLarge) => {
                checked.too_large += 1
            }
            (ids, expected) => {
                let ours = ids.map(IdsDigest::of);
                let detail = full.detail.as_deref().unwrap_or("");
                checked.differences.push(format!("{}: {ours:?} is not {expected:?} {detail}", name()));
            }
        }
    }
}
