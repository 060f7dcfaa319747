//! Probes at load how a chat template treats earlier turns, by rendering synthetic conversations.

use crate::{ChatBody, PrefixError};

/// Whether the prompt of a longer conversation starts with that of the shorter one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PrefixStability {
    /// Every step's prompt starts with the whole prompt of the previous step.
    AppendOnly,
    /// The last user message and what follows it may be rendered differently once more messages follow (reasoning
    /// dropped, tools moved to the newest turn); everything before it stays.
    RewritesLastTurns,
    /// A later turn may change any earlier part, or the template could not be probed.
    Unsafe,
}

impl PrefixStability {
    /// Returns the worst stability in the probes; probes that the template rejects are ignored. `render` renders the
    /// prompt of a request.
    pub(crate) fn probe(render: impl Fn(&ChatBody) -> Result<String, PrefixError>) -> Self {
        let shown = PROBES.iter().filter_map(|probe| probe.kind(&render));
        shown.max().unwrap_or(Self::Unsafe)
    }
}

/// A conversation whose messages each contain a unique marker.
struct ProbeConversation {
    /// Request fields before the messages.
    head: &'static str,
    turns: &'static [ProbeMessage],
}

#[derive(Clone, Copy)]
struct ProbeMessage {
    role: ProbeRole,
    /// Text that occurs in this message only.
    marker: &'static str,
    json: &'static str,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum ProbeRole {
    System,
    User,
    Assistant,
    Tool,
}

const fn turn(role: ProbeRole, marker: &'static str, json: &'static str) -> ProbeMessage {
    ProbeMessage { role, marker, json }
}

const SYSTEM: ProbeMessage = turn(ProbeRole::System, "heron", r#"{"role":"system","content":"heron"}"#);
const ASK: [ProbeMessage; 4] = [
    turn(ProbeRole::User, "otter", r#"{"role":"user","content":"otter"}"#),
    turn(ProbeRole::User, "crane", r#"{"role":"user","content":"crane"}"#),
    turn(ProbeRole::User, "gecko", r#"{"role":"user","content":"gecko"}"#),
    turn(ProbeRole::User, "raven", r#"{"role":"user","content":"raven"}"#),
];
const SAY: [ProbeMessage; 3] = [
    turn(ProbeRole::Assistant, "viper", r#"{"role":"assistant","content":"viper"}"#),
    turn(ProbeRole::Assistant, "bison", r#"{"role":"assistant","content":"bison"}"#),
    turn(ProbeRole::Assistant, "moose", r#"{"role":"assistant","content":"moose"}"#),
];
const THINK: [ProbeMessage; 2] = [
    turn(ProbeRole::Assistant, "lemur", r#"{"role":"assistant","reasoning":"hidden","content":"lemur"}"#),
    turn(ProbeRole::Assistant, "tapir", r#"{"role":"assistant","content":"<think>\nhidden\n</think>\n\ntapir"}"#),
];
const CALL: [ProbeMessage; 3] = [
    turn(
        ProbeRole::Assistant,
        "finch",
        r#"{"role":"assistant","reasoning":"hidden","content":"","tool_calls":[{"id":"callfinch","type":"function","function":{"name":"look","arguments":"{\"at\":\"finch\"}"}}]}"#,
    ),
    turn(
        ProbeRole::Assistant,
        "quail",
        r#"{"role":"assistant","content":"","tool_calls":[{"id":"callquail","type":"function","function":{"name":"look","arguments":"{\"at\":\"quail\"}"}}]}"#,
    ),
    turn(
        ProbeRole::Assistant,
        "stork",
        r#"{"role":"assistant","content":"","tool_calls":[{"id":"callstork","type":"function","function":{"name":"look","arguments":"{\"at\":\"stork\"}"}}]}"#,
    ),
];
const RESULT: [ProbeMessage; 3] = [
    turn(ProbeRole::Tool, "mouse", r#"{"role":"tool","tool_call_id":"callfinch","content":"mouse"}"#),
    turn(ProbeRole::Tool, "shrew", r#"{"role":"tool","tool_call_id":"callquail","content":"shrew"}"#),
    turn(ProbeRole::Tool, "camel", r#"{"role":"tool","tool_call_id":"callstork","content":"camel"}"#),
];
const TOOLS: &str = r#""tools":[{"type":"function","function":{"name":"look","description":"Looks","parameters":{"type":"object","properties":{"at":{"type":"string"}}}}}],"#;

const PROBES: [ProbeConversation; 4] = [
    ProbeConversation { head: "", turns: &[ASK[0], SAY[0], ASK[1], SAY[1], ASK[2], SAY[2], ASK[3]] },
    ProbeConversation { head: "", turns: &[SYSTEM, ASK[0], SAY[0], ASK[1], SAY[1], ASK[2]] },
    ProbeConversation { head: "", turns: &[ASK[0], THINK[0], ASK[1], THINK[1], ASK[2], SAY[2], ASK[3]] },
    ProbeConversation {
        head: TOOLS,
        turns: &[ASK[0], CALL[0], RESULT[0], CALL[1], RESULT[1], SAY[0], ASK[1], CALL[2], RESULT[2], SAY[1], ASK[2]],
    },
];

/// The prompt of one step of a probe, and its number of messages.
struct ProbePrompt {
    turns: usize,
    prompt: String,
}

impl ProbeConversation {
    /// Compares the prompts of all pairs of steps; `None` if the template rejects the conversation.
    fn kind(&self, render: impl Fn(&ChatBody) -> Result<String, PrefixError>) -> Option<PrefixStability> {
        let ends =
            (1..=self.turns.len()).filter(|n| matches!(self.turns[n - 1].role, ProbeRole::User | ProbeRole::Tool));
        let steps: Vec<ProbePrompt> = ends.map(|turns| self.step(&render, turns)).collect::<Option<_>>()?;
        let pairs =
            steps.iter().enumerate().flat_map(|(n, early)| steps[n + 1..].iter().map(move |late| (early, late)));
        pairs.map(|(early, late)| self.compare(early, late)).max()
    }

    fn step(&self, render: impl Fn(&ChatBody) -> Result<String, PrefixError>, turns: usize) -> Option<ProbePrompt> {
        let messages: Vec<&str> = self.turns[..turns].iter().map(|turn| turn.json).collect();
        let body = format!("{{{}\"messages\":[{}]}}", self.head, messages.join(","));
        let prompt = render(&ChatBody::parse(body.as_bytes()).ok()?).ok()?;
        Some(ProbePrompt { turns, prompt })
    }

    fn compare(&self, early: &ProbePrompt, late: &ProbePrompt) -> PrefixStability {
        let same = early.prompt.bytes().zip(late.prompt.bytes()).take_while(|(a, b)| a == b).count();
        if same == early.prompt.len() {
            return PrefixStability::AppendOnly;
        }
        let turns = &self.turns[..early.turns];
        let last_question = turns.iter().rposition(|turn| turn.role == ProbeRole::User).unwrap_or(0);
        // The system prompt may move along with the newest turn.
        let mut settled = turns[..last_question].iter().filter(|turn| turn.role != ProbeRole::System);
        let stays =
            |turn: &ProbeMessage| early.prompt.find(turn.marker).is_none_or(|at| at + turn.marker.len() <= same);
        match settled.all(stays) {
            true => PrefixStability::RewritesLastTurns,
            false => PrefixStability::Unsafe,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ModelFiles, ModelTokenizer, ModelTokenizerSource};
    use std::path::Path;

    fn folder(path: &str) -> ModelFiles<'static> {
        ModelFiles::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap()
    }

    fn kind(files: ModelFiles<'_>) -> PrefixStability {
        ModelTokenizer::load(ModelTokenizerSource::Files(files)).unwrap().prefix_stability()
    }

    fn of_template(template: &str) -> PrefixStability {
        let chat_template = Some(template.as_bytes().to_vec().into());
        kind(ModelFiles { chat_template, ..folder("../../configs/models/tiny") })
    }

    #[test]
    fn committed_families_are_classified_correctly() {
        assert_eq!(kind(folder("../../configs/models/tiny")), PrefixStability::AppendOnly);
        let known = |kind_expected, families: &[&str]| {
            for family in families {
                assert_eq!(kind(folder(&format!("testdata/models/{family}"))), kind_expected, "{family}");
            }
        };
        known(PrefixStability::AppendOnly, &["llama_like", "chatml", "gemma3", "phi4_mini", "deepseek_v31"]);
        // These drop reasoning, move tools to the newest turn, or render a generation prompt that the assistant
        // message lacks.
        known(PrefixStability::RewritesLastTurns, &["qwen_like", "mistral_like", "mistral_v7"]);
        known(PrefixStability::RewritesLastTurns, &["deepseek_r1", "harmony", "glm45", "kimi_k2"]);
    }

    #[test]
    fn template_that_counts_messages_at_its_head_is_unsafe() {
        let template = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}";
        assert_eq!(of_template(template), PrefixStability::Unsafe);
    }

    #[test]
    fn template_that_drops_old_turns_is_unsafe() {
        assert_eq!(of_template("{% for m in messages[-3:] %}[{{ m.content }}]{% endfor %}"), PrefixStability::Unsafe);
    }

    #[test]
    fn template_with_a_dropped_generation_prompt_rewrites_the_last_turn() {
        let template = "{% for m in messages %}[{{ m.role }} {{ m.content }}]{% endfor %}{% if add_generation_prompt %}[assistant <think>{% endif %}";
        assert_eq!(of_template(template), PrefixStability::RewritesLastTurns);
    }

    #[test]
    fn template_that_refuses_every_probe_is_unsafe() {
        assert_eq!(of_template("{{ raise_exception('no') }}"), PrefixStability::Unsafe);
        let files = ModelFiles { chat_template: None, ..folder("../../configs/models/tiny") };
        assert_eq!(kind(files), PrefixStability::Unsafe);
    }

    #[test]
    fn unsupported_probes_are_skipped_in_classification() {
        let template = "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('no') }}{% endif %}{{ m.role }}: {{ m.content }};{% endfor %}";
        assert_eq!(of_template(template), PrefixStability::AppendOnly);
    }
}
