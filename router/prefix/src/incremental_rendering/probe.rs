//! Proof, at load, that a template's prompts can be joined from a known part and a new one.

use super::{
    BodyEnvelope, CutSuccessor, HistorySummary, RenderedTail, SystemPromptForm, TemplateCapabilities, TurnContinuation,
    shorten_variables,
};
use crate::chat::{CallFieldOrder, TemplateVariables};
use crate::message_scan::{MessageScan, QuestionState};
use crate::{ChatBody, ModelTokenizer, PrefixStability, WallTime};

const TOOLS: &str = r#""tools":[{"type":"function","function":{"name":"look","description":"Looks","parameters":{"type":"object","properties":{"at":{"type":"string"}}}}},{"type":"function","function":{"name":"listen","parameters":{}}}],"#;
const SYSTEM: &str = r#"{"role":"system","content":"You are a heron."}"#;
const ASK: [&str; 3] = [
    r#"{"role":"user","content":"otter"}"#,
    r#"{"role":"user","content":" crane, and\nmore\n"}"#,
    r#"{"role":"user","content":"gecko"}"#,
];
const SAY: [&str; 3] = [
    r#"{"role":"assistant","content":"viper"}"#,
    r#"{"role":"assistant","reasoning":"hidden","content":"lemur"}"#,
    r#"{"role":"assistant","content":"<think>\nhidden\n</think>\n\ntapir"}"#,
];
const CALL: [&str; 2] = [
    r#"{"role":"assistant","reasoning":"hidden","content":"","tool_calls":[{"id":"callfinch","type":"function","function":{"name":"look","arguments":"{\"at\":\"finch\"}"}}]}"#,
    r#"{"role":"assistant","content":"","tool_calls":[{"id":"callquail","type":"function","function":{"name":"look","arguments":"{\"at\":\"quail\"}"}}]}"#,
];
const RESULT: [&str; 2] = [
    r#"{"role":"tool","tool_call_id":"callfinch","content":"mouse"}"#,
    r#"{"role":"tool","tool_call_id":"callquail","content":"shrew"}"#,
];

type ProbeDialogue = (&'static str, &'static [&'static str]);

/// Probe conversations. Those that a template rejects prove nothing.
const PROBES: [ProbeDialogue; 6] = [
    ("", &[ASK[0], SAY[0], ASK[1], SAY[0], ASK[2]]),
    ("", &[SYSTEM, ASK[0], SAY[0], ASK[1], SAY[1], ASK[2]]),
    ("", &[ASK[0], SAY[1], ASK[1], SAY[2], ASK[2], SAY[0], ASK[0]]),
    (
        TOOLS,
        &[SYSTEM, ASK[0], CALL[0], RESULT[0], CALL[1], RESULT[1], SAY[1], ASK[1], CALL[1], RESULT[1], SAY[0], ASK[2]],
    ),
    (
        TOOLS,
        &[
            ASK[0], SAY[0], ASK[1], CALL[0], RESULT[0], CALL[1], RESULT[1], CALL[0], RESULT[0], SAY[2], ASK[2], SAY[0],
            ASK[1],
        ],
    ),
    (TOOLS, &[SYSTEM, ASK[0], CALL[0], RESULT[0], RESULT[1], CALL[1], RESULT[1], RESULT[0], SAY[0], ASK[1]]),
];

const LATE_SYSTEM: &str = r#"{"role":"system","content":"Mind the swans."}"#;

/// Probe conversations with system messages among the others.
const LATE_PROBES: [ProbeDialogue; 3] = [
    ("", &[SYSTEM, ASK[0], LATE_SYSTEM, SAY[0], ASK[1], LATE_SYSTEM, SAY[1], LATE_SYSTEM, ASK[2], SAY[0], ASK[0]]),
    ("", &[ASK[0], SAY[1], LATE_SYSTEM, ASK[1], SAY[2], ASK[2], LATE_SYSTEM, SAY[0], ASK[0]]),
    (
        TOOLS,
        &[
            SYSTEM,
            ASK[0],
            CALL[0],
            RESULT[0],
            LATE_SYSTEM,
            CALL[1],
            RESULT[1],
            SAY[1],
            LATE_SYSTEM,
            ASK[1],
            CALL[1],
            RESULT[1],
        ],
    ),
];

/// A probe conversation up to one of its steps.
struct ProbeStep {
    order: CallFieldOrder,
    body: String,
    prompt: String,
    variables: TemplateVariables,
    scan: MessageScan,
}

/// Position where a step's prompt can be cut.
struct CutPoint<'a> {
    step: &'a ProbeStep,
    message: usize,
    following_turn: TurnContinuation,
    cut: RenderedTail,
}

impl ProbeStep {
    fn is_stable_within_day(&self, text: &ModelTokenizer) -> bool {
        let chat = ChatBody::parse(self.body.as_bytes());
        chat.is_ok_and(|chat| text.is_stable_within_day(&chat, (WallTime::default(), &self.prompt)))
    }
}

impl TemplateCapabilities {
    /// Returns for each continuation the shortest system prompt that joins all probes exactly; `None` if prompts must
    /// be rendered in full.
    pub(crate) fn probe(text: &ModelTokenizer) -> Option<Self> {
        let kind = text.prefix_stability();
        let dated = text.template_mentions("strftime_now");
        if kind == PrefixStability::Unsafe || dated && !text.prints_at_most_dates() {
            return None;
        }
        let all = |probes: &[ProbeDialogue], order| -> Vec<Vec<ProbeStep>> {
            probes.iter().map(|probe| steps(text, *probe, order)).collect()
        };
        let probes = all(&PROBES, CallFieldOrder::Declared);
        if dated && !probes.iter().flatten().all(|step| step.is_stable_within_day(text)) {
            return None;
        }
        let shown =
            |proven| Self { kind, proven, prints_date: dated, supports_late_system: false, supports_name_first: false };
        let least = |follows| {
            let heads = [SystemPromptForm::Placeholder, SystemPromptForm::Full].into_iter();
            heads.map(Some).find(|heads| shown([*heads; 3]).is_proven(text, &probes, follows)).flatten()
        };
        let mut windowing = shown(CutSuccessor::ALL.map(least));
        // Proven again together: cuts may be found with one form of the system prompt and used with another.
        if !windowing.is_proven_for(text, &probes) {
            return None;
        }
        windowing.supports_late_system = windowing.is_proven_for(text, &all(&LATE_PROBES, CallFieldOrder::Declared));
        windowing.supports_name_first = windowing.is_proven_for(text, &all(&PROBES, CallFieldOrder::NameFirst));
        Some(windowing)
    }

    /// Returns whether these conversations prove every successor that is used.
    fn is_proven_for(&self, text: &ModelTokenizer, probes: &[Vec<ProbeStep>]) -> bool {
        let mut used =
            CutSuccessor::ALL.into_iter().filter(|follows| self.proven[*follows as usize].is_some()).peekable();
        used.peek().is_some() && used.all(|follows| self.is_proven(text, probes, follows))
    }

    /// Returns whether every longer prompt joins exactly, and there was at least one.
    fn is_proven(&self, text: &ModelTokenizer, probes: &[Vec<ProbeStep>], follows: CutSuccessor) -> bool {
        let mut proofs = 0;
        for steps in probes {
            for (n, early) in steps.iter().enumerate() {
                let Some(known) = self.cut_points(text, early, follows) else { return false };
                for known in known {
                    for late in &steps[n + 1..] {
                        match self.joins_exactly(text, &known, (late, follows)) {
                            Some(true) => proofs += 1,
                            Some(false) => return false,
                            None => {}
                        }
                    }
                }
            }
        }
        proofs > 0
    }

    /// Returns all cut points of a step's prompt, or `None` if the text rendered after a cut with this successor is
    /// not how the prompt ends.
    fn cut_points<'a>(
        &self,
        text: &ModelTokenizer,
        step: &'a ProbeStep,
        follows: CutSuccessor,
    ) -> Option<Vec<CutPoint<'a>>> {
        let places = (0..step.scan.messages.len()).filter(|at| step.scan.messages[*at].is_plain);
        let cuts = places.filter_map(|after| Some((after, self.render_cut_after(text, step, after)?)));
        let known = cuts.filter_map(|(after, (cut_in, now, cut))| match step.prompt.ends_with(&cut.rest) {
            true => Some(Some(CutPoint { step, message: after, following_turn: cut_in, cut })),
            false => (now == follows).then_some(None),
        });
        known.collect()
    }

    fn render_cut_after(
        &self,
        text: &ModelTokenizer,
        step: &ProbeStep,
        after: usize,
    ) -> Option<(TurnContinuation, CutSuccessor, RenderedTail)> {
        let messages = &step.scan.messages;
        let turn = TurnContinuation::of(&messages[after + 1..]);
        let leads = step.scan.leading_roles()?;
        // Of the leading messages only the last one can be cut after.
        let own = after + 1 == leads.len();
        if after + 1 < leads.len() {
            return None;
        }
        let body = step.body.as_bytes();
        let shown = leads.len() - usize::from(own);
        let before = HistorySummary {
            question: step.scan.question_state(after, QuestionState::Never),
            last_role: messages[after].role,
            leading_roles: leads[..shown].into(),
        };
        let head = if shown == 0 { step.scan.start } else { messages[shown - 1].end };
        let around = BodyEnvelope { head: &body[..head], suffix: &body[step.scan.end..], call_order: step.order };
        let new = &body[messages[after].end..step.scan.end - 1];
        let heads = self.system_prompt_form(turn, &before)?;
        let cut = text.render_cut((&before, new), (heads, &step.variables, around), WallTime::default()).ok()??;
        Some((turn, CutSuccessor::of(turn, &before), cut))
    }

    /// Returns whether the longer prompt equals the shorter one's known part plus the new text; `None` if extension
    /// would not be tried here.
    fn joins_exactly(
        &self,
        text: &ModelTokenizer,
        known: &CutPoint<'_>,
        (late, wanted): (&ProbeStep, CutSuccessor),
    ) -> Option<bool> {
        let (turn, follows, cut) = self.render_cut_after(text, late, known.message)?;
        let alike = cut.gap == known.cut.gap && cut.cut_token == known.cut.cut_token;
        if follows != wanted || !alike || !self.is_cut_valid(known.following_turn, turn) {
            return None;
        }
        let early = known.step.prompt.strip_suffix(&*known.cut.rest)?;
        Some(late.prompt.strip_prefix(early) == Some(&*cut.rest))
    }
}

fn steps(text: &ModelTokenizer, (head, messages): ProbeDialogue, order: CallFieldOrder) -> Vec<ProbeStep> {
    let has_question = |message: &str| message.contains(r#""role":"user""#) || message.contains(r#""role":"tool""#);
    let ends = (1..=messages.len()).filter(|end| has_question(messages[end - 1]));
    ends.filter_map(|end| step(text, (head, &messages[..end]), order)).collect()
}

fn step(text: &ModelTokenizer, (head, messages): (&str, &[&str]), order: CallFieldOrder) -> Option<ProbeStep> {
    let body = format!("{{{head}\"messages\":[{}]}}", messages.join(","));
    let chat = ChatBody::parse(body.as_bytes()).ok()?.with_call_order(order);
    let prompt = text.render(&chat, WallTime::default()).ok()?;
    let variables = shorten_variables(chat.variables().ok()?)?;
    let scan = MessageScan::of_body(body.as_bytes(), &[])?;
    Some(ProbeStep { order, body, prompt, variables, scan })
}
