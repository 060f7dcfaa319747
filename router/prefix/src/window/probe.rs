//! The proof, at load, that a template's prompts can be put together from an old part and a new one.

use super::{Around, Before, Cut, Follows, Heads, Turn, Windowing, short};
use crate::chat::{CallOrder, Variables};
use crate::scan::{Asked, Scan};
use crate::{ChatBody, ModelText, TemplateKind, WallTime};

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

type Probe = (&'static str, &'static [&'static str]);

/// What conversations look like. A template refuses some of them, which then say nothing.
const PROBES: [Probe; 6] = [
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

const LATE: &str = r#"{"role":"system","content":"Mind the swans."}"#;

/// The same with system messages among the others.
const LATE_PROBES: [Probe; 3] = [
    ("", &[SYSTEM, ASK[0], LATE, SAY[0], ASK[1], LATE, SAY[1], LATE, ASK[2], SAY[0], ASK[0]]),
    ("", &[ASK[0], SAY[1], LATE, ASK[1], SAY[2], ASK[2], LATE, SAY[0], ASK[0]]),
    (TOOLS, &[SYSTEM, ASK[0], CALL[0], RESULT[0], LATE, CALL[1], RESULT[1], SAY[1], LATE, ASK[1], CALL[1], RESULT[1]]),
];

/// A conversation up to one of its steps.
struct Step {
    order: CallOrder,
    body: String,
    prompt: String,
    variables: Variables,
    scan: Scan,
}

/// A place where a step's prompt can be cut.
struct Known<'a> {
    step: &'a Step,
    after: usize,
    cut_in: Turn,
    cut: Cut,
}

impl Step {
    fn is_of_the_day(&self, text: &ModelText) -> bool {
        let chat = ChatBody::parse(self.body.as_bytes());
        chat.is_ok_and(|chat| text.is_of_the_day(&chat, (WallTime::default(), &self.prompt)))
    }
}

impl Windowing {
    /// The least that must be shown of a template's prompts; none where the whole must be.
    pub(crate) fn probe(text: &ModelText) -> Option<Self> {
        let kind = text.template_kind();
        let dated = text.template_mentions("strftime_now");
        if kind == TemplateKind::Unsafe || dated && !text.is_at_most_dated() {
            return None;
        }
        let all = |probes: &[Probe], order| -> Vec<Vec<Step>> {
            probes.iter().map(|probe| steps(text, *probe, order)).collect()
        };
        let probes = all(&PROBES, CallOrder::Declared);
        if dated && !probes.iter().flatten().all(|step| step.is_of_the_day(text)) {
            return None;
        }
        let shown = |proven| Self { kind, proven, dated, late_system: false, name_first: false };
        let least = |follows| {
            let heads = [Heads::Elided, Heads::Real].into_iter();
            heads.map(Some).find(|heads| shown([*heads; 3]).is_proven(text, &probes, follows)).flatten()
        };
        let mut windowing = shown(Follows::ALL.map(least));
        // Cuts are found in one way and used in another.
        if !windowing.holds_for(text, &probes) {
            return None;
        }
        windowing.late_system = windowing.holds_for(text, &all(&LATE_PROBES, CallOrder::Declared));
        windowing.name_first = windowing.holds_for(text, &all(&PROBES, CallOrder::NameFirst));
        Some(windowing)
    }

    /// Whether all that is used is proven by these conversations.
    fn holds_for(&self, text: &ModelText, probes: &[Vec<Step>]) -> bool {
        let mut used = Follows::ALL.into_iter().filter(|follows| self.proven[*follows as usize].is_some()).peekable();
        used.peek().is_some() && used.all(|follows| self.is_proven(text, probes, follows))
    }

    /// Whether all longer prompts can be put together, and there were some.
    fn is_proven(&self, text: &ModelText, probes: &[Vec<Step>], follows: Follows) -> bool {
        let mut proofs = 0;
        for steps in probes {
            for (n, early) in steps.iter().enumerate() {
                let Some(known) = self.known(text, early, follows) else { return false };
                for known in known {
                    for late in &steps[n + 1..] {
                        match self.joins(text, &known, (late, follows)) {
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

    /// All places where a step's prompt can be cut; none where what is said to follow does not.
    fn known<'a>(&self, text: &ModelText, step: &'a Step, follows: Follows) -> Option<Vec<Known<'a>>> {
        let places = (0..step.scan.messages.len()).filter(|at| step.scan.messages[*at].plain);
        let cuts = places.filter_map(|after| Some((after, self.cut_of(text, step, after)?)));
        let known = cuts.filter_map(|(after, (cut_in, now, cut))| match step.prompt.ends_with(&cut.rest) {
            true => Some(Some(Known { step, after, cut_in, cut })),
            false => (now == follows).then_some(None),
        });
        known.collect()
    }

    fn cut_of(&self, text: &ModelText, step: &Step, after: usize) -> Option<(Turn, Follows, Cut)> {
        let messages = &step.scan.messages;
        let turn = Turn::of(&messages[after + 1..]);
        let leads = step.scan.leads()?;
        // Of the leading messages only the last one is a place to cut.
        let own = after + 1 == leads.len();
        if after + 1 < leads.len() {
            return None;
        }
        let body = step.body.as_bytes();
        let shown = leads.len() - usize::from(own);
        let before = Before {
            asked: step.scan.asked(after, Asked::Never),
            last: messages[after].role,
            leads: leads[..shown].into(),
        };
        let head = if shown == 0 { step.scan.start } else { messages[shown - 1].end };
        let around = Around { head: &body[..head], suffix: &body[step.scan.end..], order: step.order };
        let new = &body[messages[after].end..step.scan.end - 1];
        let heads = self.heads(turn, &before)?;
        let cut = text.cut((&before, new), (heads, &step.variables, around), WallTime::default()).ok()??;
        Some((turn, Follows::of(turn, &before), cut))
    }

    /// Whether the longer prompt is the shorter one's known part and what follows; none where it would not be tried.
    fn joins(&self, text: &ModelText, known: &Known<'_>, (late, wanted): (&Step, Follows)) -> Option<bool> {
        let (turn, follows, cut) = self.cut_of(text, late, known.after)?;
        let alike = cut.gap == known.cut.gap && cut.token == known.cut.token;
        if follows != wanted || !alike || !self.holds(known.cut_in, turn) {
            return None;
        }
        let early = known.step.prompt.strip_suffix(&*known.cut.rest)?;
        Some(late.prompt.strip_prefix(early) == Some(&*cut.rest))
    }
}

fn steps(text: &ModelText, (head, messages): Probe, order: CallOrder) -> Vec<Step> {
    let asked = |message: &str| message.contains(r#""role":"user""#) || message.contains(r#""role":"tool""#);
    let ends = (1..=messages.len()).filter(|end| asked(messages[end - 1]));
    ends.filter_map(|end| step(text, (head, &messages[..end]), order)).collect()
}

fn step(text: &ModelText, (head, messages): (&str, &[&str]), order: CallOrder) -> Option<Step> {
    let body = format!("{{{head}\"messages\":[{}]}}", messages.join(","));
    let chat = ChatBody::parse(body.as_bytes()).ok()?.with_call_order(order);
    let prompt = text.render(&chat, WallTime::default()).ok()?;
    let variables = short(chat.variables().ok()?)?;
    let scan = Scan::whole(body.as_bytes(), &[])?;
    Some(Step { order, body, prompt, variables, scan })
}
