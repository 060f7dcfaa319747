//! Recorded sessions against what `transformers` makes of each of their steps: in full, from checkpoints, and grown from
//! the step before. Shared by the test over the committed dialogues and by the example that checks whole trace folders.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use prefix::{
    Asked, ChatForm, ChatLayout, Checkpoint, FallbackReason, Identifier, IdentifierOptions, Identity, Limits, Memory,
    ModelText, ModelTextSource, Trails, WallTime,
};
use serde::Deserialize;
use serde_json::value::RawValue;
use vocabulary::{Bytes, Namespace, Seed, Tokens};

/// Digests of what `transformers` makes of sessions, by model and by the session's place in its file.
#[derive(Deserialize)]
pub(crate) struct StepGoldens {
    now: i64,
    tools: Option<Box<RawValue>>,
    models: BTreeMap<String, BTreeMap<usize, Vec<Option<IdsDigest>>>>,
}

/// How many ids, and FNV-1a of them as little-endian 32-bit numbers, in hexadecimal.
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

/// The messages of a session, and which of them each step sent; without `steps`, all before each answer.
#[derive(Deserialize)]
struct Session {
    traj: Vec<Box<RawValue>>,
    steps: Option<Vec<Vec<usize>>>,
}

#[derive(Deserialize)]
struct Role<'a> {
    role: &'a str,
}

impl Session {
    fn steps(&self) -> Vec<Vec<usize>> {
        let answers = |at: &usize| serde_json::from_str::<Role<'_>>(self.traj[*at].get()).unwrap().role == "assistant";
        let before_answers = || (1..self.traj.len()).filter(answers).map(|at| (0..at).collect()).collect();
        self.steps.clone().unwrap_or_else(before_answers)
    }

    fn body(&self, step: &[usize], tools: Option<&RawValue>) -> String {
        let messages: Vec<&str> = step.iter().map(|at| self.traj[*at].get()).collect();
        let tools = tools.map_or("null", RawValue::get);
        format!("{{\"model\":\"m\",\"tools\":{tools},\"messages\":[{}]}}", messages.join(","))
    }
}

/// What was checked, and what differed.
#[derive(Default)]
pub(crate) struct Checked {
    pub(crate) steps: usize,
    pub(crate) refused: usize,
    pub(crate) tokens: u64,
    /// Tokens that checkpoints knew.
    pub(crate) known: u64,
    /// Steps that were grown from the one before, and the tokens that it left known.
    pub(crate) grown: (usize, u64),
    /// Steps that only the bound on endless words keeps from being exact.
    pub(crate) too_large: usize,
    pub(crate) differences: Vec<String>,
}

impl std::ops::AddAssign for Checked {
    fn add_assign(&mut self, more: Self) {
        self.steps += more.steps;
        self.refused += more.refused;
        self.tokens += more.tokens;
        self.known += more.known;
        self.grown.0 += more.grown.0;
        self.grown.1 += more.grown.1;
        self.too_large += more.too_large;
        self.differences.extend(more.differences);
    }
}

/// The folder of a model by its name in the goldens.
pub(crate) fn folder(model: &str) -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    match model {
        "tiny" => here.join("../../configs/models/tiny"),
        _ => here.join("testdata/models").join(model),
    }
}

/// Every step of the sessions, for every model of the goldens.
pub(crate) fn check(sessions: &Path, goldens: &Path) -> BTreeMap<String, Checked> {
    let sessions = read_sessions(sessions);
    let goldens: StepGoldens = serde_json::from_slice(&std::fs::read(goldens).unwrap()).unwrap();
    let now = WallTime { unix_seconds: goldens.now };
    let check_model = |(model, expected): (&String, &BTreeMap<usize, Vec<Option<IdsDigest>>>)| {
        let identifier = identifier(model);
        let mut checked = Checked::default();
        for (at, steps) in expected {
            let asked = Asked { now, ..Asked::default() };
            let trails = Trails::new(Bytes(64 << 20));
            // Every other client names its conversations.
            let session = (at % 2 == 0).then_some(*at as u128);
            let mut run = Run { identifier: &identifier, asked, known: None, trails, session };
            for (n, (step, expected)) in sessions[*at].steps().iter().zip(steps).enumerate() {
                let body = sessions[*at].body(step, goldens.tools.as_deref());
                run.step(&body, expected.as_ref(), &mut checked, || format!("{model}, session {at}, step {n}"));
            }
        }
        (model.clone(), checked)
    };
    goldens.models.iter().map(check_model).collect()
}

fn read_sessions(path: &Path) -> Vec<Session> {
    let mut json = Vec::new();
    flate2::read::GzDecoder::new(std::fs::File::open(path).unwrap()).read_to_end(&mut json).unwrap();
    serde_json::from_slice(&json).unwrap()
}

fn identifier(model: &str) -> Identifier {
    let text = ModelText::load(ModelTextSource::Folder(folder(model))).unwrap();
    let namespace = Namespace { model: model.into(), revision: "".into(), tokenizer: "".into() };
    Identifier::new(IdentifierOptions {
        namespace,
        seed: Seed(7),
        block: Tokens(16),
        text: Some(Arc::new(text)),
        limits: Limits::default(),
    })
}

/// One session on its way.
struct Run<'a> {
    identifier: &'a Identifier,
    asked: Asked<'a>,
    known: Option<Checkpoint>,
    trails: Trails,
    session: Option<u128>,
}

impl Run<'_> {
    fn step(&mut self, body: &str, expected: Option<&IdsDigest>, checked: &mut Checked, name: impl Fn() -> String) {
        checked.steps += 1;
        let full = self.identifier.chat(body.as_bytes(), self.asked);
        let from = self.identifier.conversation(ChatForm::Chat, body.as_bytes(), (self.asked, self.known.as_ref()));
        if from.prompt != full {
            checked.differences.push(format!("{}: from a checkpoint it is another prompt", name()));
        }
        checked.known += from.known.0;
        self.known = from.next.or(self.known.take());
        let layout = ChatLayout::read(body.as_bytes()).expect("a chat body with messages");
        let memory = Memory { trails: &self.trails, tenant: "recorded", session: self.session };
        match self.identifier.grow(layout, self.asked, memory) {
            Some(grown) => {
                checked.grown.0 += 1;
                checked.grown.1 += grown.known.0;
                if let Some(difference) = grown.prompt.difference(&full) {
                    let (name, rung) = (name(), grown.rung.as_ref());
                    checked.differences.push(format!("{name}: grown by {rung} it is another prompt: {difference:?}"));
                }
            }
            None => drop(self.identifier.begin(layout, self.asked, None, memory)),
        }
        match (full.tokens(), expected) {
            (Some(ids), Some(expected)) if IdsDigest::of(ids) == *expected => checked.tokens += ids.len() as u64,
            (None, None) => checked.refused += 1,
            (None, Some(_)) if full.identity == Identity::Fallback(FallbackReason::TooLarge) => checked.too_large += 1,
            (ids, expected) => {
                let ours = ids.map(IdsDigest::of);
                let detail = full.detail.as_deref().unwrap_or("");
                checked.differences.push(format!("{}: {ours:?} is not {expected:?} {detail}", name()));
            }
        }
    }
}
