//! Planner tests as text: a scene in a few lines, the decision in one.

mod admission;
mod attention;
mod eviction_cost;
mod kv_occupancy;
mod legality;
mod prefix_replication;
mod prices;
mod properties;
mod rank_memory;
mod scenarios;

use std::str::FromStr;

use vocabulary::*;

use crate::*;

/// Planning inputs of a test scene. Defaults: blocks of 16 tokens, 100 us of compute per token, 20 ms per decode step
/// plus 1 ms per running request, 100 kB of KV per token, a link of 10 ms + 10 us per token; lambda is 50, mu 0.25, and
/// transfers have no risk.
pub(crate) struct PlanningScene {
    pub(crate) step: StepKind,
    pub(crate) ask: RequestProfile,
    pub(crate) attention: Option<AttentionSpec>,
    pub(crate) session: SessionView,
    pub(crate) workers: Vec<WorkerView>,
    pub(crate) shapes: Vec<(WorkerId, ParallelShape)>,
    pub(crate) overlaps: Vec<Overlap>,
    pub(crate) excluded: Vec<WorkerId>,
    pub(crate) policy: Policy,
    pub(crate) disabled: ActionSet,
    pub(crate) barred: Vec<DirectedLink>,
    pub(crate) round_robin_index: u64,
    pub(crate) occupancy: OccupancyModel,
    pub(crate) now: Micros,
}

impl PlanningScene {
    /// Parses lines of `session`, `ask`, `attention`, `policy` and `worker NAME ROLE`, each followed by `key=value`
    /// words.
    pub(crate) fn read(text: &str) -> Self {
        let mut scene = Self::empty();
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
            let mut words = line.split_whitespace();
            match words.next().unwrap() {
                "session" => words.for_each(|word| scene.session_word(word)),
                "ask" => words.for_each(|word| scene.ask_word(word)),
                "attention" => words.for_each(|word| scene.attention_word(word)),
                "policy" => words.for_each(|word| scene.policy_word(word)),
                "worker" => {
                    let (name, role) = (words.next().unwrap(), words.next().unwrap());
                    scene.workers.push(worker(name, role));
                    words.for_each(|word| scene.worker_word(word));
                }
                other => panic!("no such line: {other}"),
            }
        }
        scene
    }

    pub(crate) fn inputs(&self) -> PlanningInputs<'_> {
        PlanningInputs {
            step: self.step,
            request: &self.ask,
            attention: self.attention.as_ref(),
            session: &self.session,
            workers: &self.workers,
            shapes: &self.shapes,
            overlaps: &self.overlaps,
            occupancy: OccupancyView { model: &self.occupancy, now: self.now },
            excluded: &self.excluded,
            policy: &self.policy,
            disabled: DisabledFeatures { actions: self.disabled, links: &self.barred },
            round_robin_index: self.round_robin_index,
        }
    }

    pub(crate) fn plan(&self) -> Decision {
        plan(&self.inputs()).unwrap()
    }

    pub(crate) fn name(&self, id: WorkerId) -> &str {
        self.workers.iter().find(|view| view.id == id).map_or("nobody", |view| &view.endpoint)
    }

    fn empty() -> Self {
        Self {
            step: StepKind::SmallIncrement,
            ask: RequestProfile {
                model: "m".into(),
                adapter: None,
                prompt_tokens: Tokens(1_600),
                longest_prompt_tokens: None,
                expected_output_tokens: Tokens(100),
                expected_growth_tokens: Tokens(u64::MAX),
                block_size: Tokens(16),
                transfers: TransferPermission::Allowed,
            },
            attention: None,
            session: SessionView::new(SessionId(1)),
            workers: Vec::new(),
            shapes: Vec::new(),
            overlaps: Vec::new(),
            excluded: Vec::new(),
            policy: Policy {
                memory_cost_per_mib: 50.0,
                interference_weight: 0.25,
                transfer: TransferTimeMargin { fixed_overhead: Micros(0), proportional_overhead: 0.0 },
                ..Policy::default()
            },
            disabled: ActionSet::NONE,
            barred: Vec::new(),
            round_robin_index: 0,
            occupancy: OccupancyModel::default(),
            now: Micros(0),
        }
    }

    /// Parses `id=N owner=NAME owner_rank=N sealed=BLOCKS replica=NAME promise=NAME:BLOCKS`; `+life` after a name means
    /// another incarnation.
    fn session_word(&mut self, word: &str) {
        let (key, value) = word.split_once('=').unwrap();
        let owner = |name: &str| {
            let life = if name.ends_with("+life") { 2 } else { 1 };
            Owner { worker: id(name.trim_end_matches("+life")), incarnation: Incarnation(life), rank: DpRank(0) }
        };
        match key {
            "id" => self.session.id = SessionId(number(value)),
            "owner" => {
                self.session.owner = Some(owner(value));
                self.session.epoch = Epoch { generation: 0, index: 7, position: 0 };
            }
            "owner_rank" => self.session.owner.as_mut().unwrap().rank = DpRank(number(value)),
            "sealed" => self.session.sealed = Blocks(number(value)),
            "replica" => self.session.replicas.push(owner(value)),
            "promise" => {
                let (name, blocks) = value.split_once(':').unwrap();
                let promise = LiveIntent { worker: id(name), rank: DpRank(0), blocks: Blocks(number(blocks)) };
                self.session.peer_intents.push(promise);
            }
            other => panic!("no such word: {other}"),
        }
    }

    /// Parses `step=KIND model=M adapter=A prompt=TOKENS answer=TOKENS block=TOKENS transfers=no exclude=NAME
    /// round_robin_index=N`.
    fn ask_word(&mut self, word: &str) {
        let (key, value) = word.split_once('=').unwrap();
        match key {
            "step" => self.step = serde_json::from_value(value.into()).unwrap(),
            "model" => self.ask.model = value.into(),
            "adapter" => self.ask.adapter = Some(value.into()),
            "prompt" => self.ask.prompt_tokens = Tokens(number(value)),
            "answer" => self.ask.expected_output_tokens = Tokens(number(value)),
            "block" => self.ask.block_size = Tokens(number(value)),
            "transfers" => self.ask.transfers = TransferPermission::Forbidden(RequestTransferBlocker::SeveralChoices),
            "exclude" => self.excluded.push(id(value)),
            "turn" => self.round_robin_index = number(value),
            other => panic!("no such word: {other}"),
        }
    }

    /// Parses `of=MODEL`, a model with a committed file or `hybrid`, then `checkpoints=none|TOKENS`.
    fn attention_word(&mut self, word: &str) {
        let (key, value) = word.split_once('=').unwrap();
        let spec = match (key, value) {
            ("of", "hybrid") => crate::attention::tests::hybrid(),
            ("of", name) => crate::attention::tests::read(name),
            ("checkpoints", policy) => {
                let every = |tokens| WindowCheckpointInterval::EveryTokens(Tokens(tokens));
                let policy = policy.parse().map_or(WindowCheckpointInterval::None, every);
                self.attention.take().unwrap().with_checkpoints(policy).unwrap()
            }
            (other, _) => panic!("no such word: {other}"),
        };
        self.attention = Some(spec);
    }

    /// Parses `rule=RULE lambda=X mu=X off=ACTION barred=FROM>TO doubles=TOKENS`.
    fn policy_word(&mut self, word: &str) {
        let (key, value) = word.split_once('=').unwrap();
        match key {
            "rule" => self.policy.policy = serde_json::from_value(value.into()).unwrap(),
            "lambda" => self.policy.memory_cost_per_mib = number(value),
            "mu" => self.policy.interference_weight = number(value),
            "off" => self.policy.disabled_actions.push(serde_json::from_value(value.into()).unwrap()),
            "barred" => {
                let (from, to) = value.split_once('>').unwrap();
                self.barred.push(DirectedLink { from: id(from), to: id(to) });
            }
            "doubles" => self.policy.attention_cost_doubling_tokens = Tokens(number(value)),
            other => panic!("no such word: {other}"),
        }
    }

    /// Parses `holds=BLOCKS host=BLOCKS disk=BLOCKS holds1=BLOCKS(rank 1) running= waiting= backlog= usage= rate=
    /// knows= health= models= block= context= kv= ranks= shape=TENSORxPIPELINE fabric= carries= link=BYTES/S fixed=US
    /// bytes=PER_TOKEN`.
    fn worker_word(&mut self, word: &str) {
        let (key, value) = word.split_once('=').unwrap();
        let view = self.workers.last_mut().unwrap();
        let mut holds = |rank, tier| {
            let overlap = Overlap { worker: view.id, rank: DpRank(rank), tier, blocks: Blocks(number(value)) };
            self.overlaps.push(overlap);
        };
        match key {
            "holds" => holds(0, Tier::Hbm),
            "holds1" => holds(1, Tier::Hbm),
            "host" => holds(0, Tier::Host),
            "disk" => holds(0, Tier::Disk),
            "running" => view.load.running = number(value),
            "waiting" => view.load.waiting = number(value),
            "backlog" => view.load.backlog = Tokens(number(value)),
            "usage" => view.load.kv_usage = number(value),
            "rate" => view.speeds.prefill_tokens_per_second = number(value),
            "knows" => view.kv_index_state = serde_json::from_value(value.into()).unwrap(),
            "health" => view.health = serde_json::from_value(value.into()).unwrap(),
            "models" => view.models = value.split(',').map(ModelId::from).collect(),
            "block" => view.capacity.block = Tokens(number(value)),
            "context" => view.capacity.context = Tokens(number(value)),
            "kv" => view.capacity.kv = Tokens(number(value)),
            "shape" => {
                let (tensor, pipeline) = value.split_once('x').unwrap();
                let shape = ParallelShape { tensor: number(tensor), pipeline: number(pipeline) };
                self.shapes.push((view.id, shape));
                self.shapes.sort_unstable_by_key(|(id, _)| *id);
            }
            "ranks" => view.ranks = number(value),
            "fabric" if value == "none" => view.link = None,
            "fabric" => view.link.as_mut().unwrap().fabric = value.into(),
            "carries" => view.link.as_mut().unwrap().carries = serde_json::from_value(value.into()).unwrap(),
            "link" => view.link.as_mut().unwrap().bytes_per_second = number(value),
            "fixed" => view.link.as_mut().unwrap().fixed = Micros(number(value)),
            "bytes" => view.kv_bytes_per_token = Bytes(number(value)),
            other => panic!("no such word: {other}"),
        }
    }
}

pub(crate) fn id(name: &str) -> WorkerId {
    WorkerId::of_endpoint(name)
}

fn number<T: FromStr<Err: std::fmt::Debug>>(text: &str) -> T {
    text.parse().unwrap()
}

fn worker(name: &str, role: &str) -> WorkerView {
    WorkerView {
        id: id(name),
        endpoint: name.into(),
        incarnation: Incarnation(1),
        role: serde_json::from_value(role.into()).unwrap(),
        models: [ModelId::from("m")].into(),
        ranks: 1,
        health: WorkerHealth::Ready,
        kv_index_state: KvIndexState::Exact,
        load: WorkerLoad::default(),
        capacity: WorkerCapacity { kv: Tokens(0), block: Tokens(16), context: Tokens(0) },
        speeds: EngineSpeed {
            prefill_tokens_per_second: 10_000.0,
            decode_step: Micros(20_000),
            decode_slowdown: Micros(1_000),
        },
        kv_bytes_per_token: Bytes(100_000),
        link: Some(KvLink {
            fabric: "nixl".into(),
            fixed: Micros(10_000),
            bytes_per_second: 10e9,
            carries: KvLinkCapability::Prefixes,
        }),
    }
}

/// Formats a candidate in one line: `ACTION at TARGET CACHED+COMPUTED[, HANDOFF], OWNERSHIP`.
fn line(scene: &PlanningScene, candidate: &PlanCandidate) -> String {
    let PlanCandidate { action, sequence, ownership, .. } = candidate;
    let (prefill, decode) = (sequence.prompt_leg(), sequence.answer_leg());
    let handoffs = sequence.handoffs().map(|Handoff { kind, source, blocks, .. }| match kind {
        HandoffKind::RemotePrefill => {
            let (cached, computed) = (prefill.cached_tokens, prefill.computed_tokens);
            format!(", prefill at {} {cached}+{computed}", scene.name(prefill.worker))
        }
        HandoffKind::Replicate => format!(", {} blocks from {}", blocks.unwrap(), scene.name(source.worker)),
    });
    let handoff = handoffs.collect::<String>();
    let ownership = match ownership {
        OwnershipEffect::Keep => "keep".to_owned(),
        OwnershipEffect::Claim => "claim".to_owned(),
        OwnershipEffect::ReadReplica => "read_replica".to_owned(),
        OwnershipEffect::Move { reason, .. } => {
            format!("move ({})", serde_json::to_value(reason).unwrap().as_str().unwrap())
        }
    };
    let rank = if decode.rank.0 == 0 { String::new() } else { format!("/{}", decode.rank.0) };
    let at = format!("{}{rank} {}+{}", scene.name(decode.worker), decode.cached_tokens, decode.computed_tokens);
    format!("{action} at {at}{handoff}, {ownership}")
}

/// Returns whether a candidate serves at this worker without a transfer.
pub(crate) fn is_local_to(candidate: &PlanCandidate, name: &str) -> bool {
    candidate.sequence.target() == id(name) && !candidate.sequence.has_handoff()
}

/// Returns the plan of a scene in one line, or the planning error.
pub(crate) fn decide(text: &str) -> String {
    let scene = PlanningScene::read(text);
    match plan(&scene.inputs()) {
        Err(none) => none.to_string(),
        Ok(decision) => {
            assert_eq!(decision.plan.check(&scene.inputs()), Ok(()));
            let Plan { action, sequence, ownership, rationale } = decision.plan;
            let (terms, total, refusal) = (rationale.cost_terms, rationale.total_cost, None);
            line(&scene, &PlanCandidate { action, sequence, ownership, cost_terms: terms, total_cost: total, refusal })
        }
    }
}

/// Asserts the plan of a scene.
#[track_caller]
pub(crate) fn check(text: &str, expected: &str) {
    assert_eq!(decide(text), expected);
}

/// Returns every candidate of a scene, one per line; refused ones with the reason instead of the ownership.
pub(crate) fn list(text: &str) -> Vec<String> {
    let scene = PlanningScene::read(text);
    let each = |candidate: &PlanCandidate| match candidate.refusal {
        None => line(&scene, candidate),
        Some(why) => format!("{} at {}: {}", candidate.action, scene.name(candidate.sequence.target()), why.as_str()),
    };
    scene.plan().candidates.iter().map(each).collect()
}

/// Returns the cost terms of one candidate of a scene, by action and target.
#[track_caller]
pub(crate) fn terms(text: &str, action: Action, target: &str) -> CostTerms {
    let scene = PlanningScene::read(text);
    let candidates = scene.plan().candidates;
    let found = candidates.iter().find(|c| c.action == action && c.sequence.target() == id(target));
    found.unwrap_or_else(|| panic!("no {action} at {target} in {:#?}", list(text))).cost_terms
}
