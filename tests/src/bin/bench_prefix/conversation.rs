//! Synthetic agent conversations: questions, tool calls and results of code-like text, deterministic by number.

use std::fmt::Write as _;

const WORDS: [&str; 32] = [
    "the", "worker", "holds", "a", "prefix", "of", "blocks", "fn", "let", "mut", "self", "return", "match", "error",
    "file", "line", "value", "test", "build", "failed", "with", "status", "and", "then", "reads", "tokens", "from",
    "cache", "struct", "impl", "while", "queue",
];

/// Text of a conversation, extended message by message.
pub(crate) struct ConversationText {
    /// Messages so far as JSON, without the enclosing brackets.
    messages: String,
    rng_state: u64,
    calls: u64,
}

impl ConversationText {
    pub(crate) fn begin(number: u64) -> Self {
        let mut talk =
            Self { messages: String::new(), rng_state: number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1, calls: 0 };
        let (system, question) = (talk.text(3000), talk.text(400));
        let _ = write!(
            talk.messages,
            r#"{{"role":"system","content":"Session {number}. {system}"}},{{"role":"user","content":"{question}"}}"#
        );
        talk
    }

    /// Appends a tool call and its result of `bytes` in total.
    pub(crate) fn step(&mut self, bytes: usize) {
        self.calls += 1;
        let (thought, argument, result) = (self.text(bytes / 4), self.text(bytes / 8), self.text(bytes * 5 / 8));
        // Tool call arguments are JSON inside a JSON string.
        let argument = argument.replace("\\n", "");
        let id = format!("call{:05}", self.calls);
        let _ = write!(
            self.messages,
            r#",{{"role":"assistant","content":"{thought}","tool_calls":[{{"id":"{id}","type":"function","function":{{"name":"run","arguments":"{{\"command\":\"{argument}\"}}"}}}}]}},{{"role":"tool","tool_call_id":"{id}","content":"{result}"}}"#
        );
    }

    /// Returns the request body as a client sends it.
    pub(crate) fn body(&self) -> String {
        let tools = r#"[{"type":"function","function":{"name":"run","description":"Runs a command","parameters":{"type":"object","properties":{"command":{"type":"string"}}}}}]"#;
        format!(r#"{{"model":"m","stream":true,"messages":[{}],"tools":{tools},"temperature":0.2}}"#, self.messages)
    }

    pub(crate) fn bytes(&self) -> usize {
        self.messages.len()
    }

    fn text(&mut self, bytes: usize) -> String {
        let mut text = String::with_capacity(bytes + 16);
        while text.len() < bytes {
            let dice = self.roll();
            match dice % 16 {
                0 => text.push_str("\\n    "),
                1 => {
                    let _ = write!(text, "{} ", dice >> 48);
                }
                _ => {
                    text.push_str(WORDS[(dice >> 32) as usize % WORDS.len()]);
                    text.push(' ');
                }
            }
        }
        text
    }

    fn roll(&mut self) -> u64 {
        self.rng_state ^= self.rng_state << 13;
        self.rng_state ^= self.rng_state >> 7;
        self.rng_state ^= self.rng_state << 17;
        self.rng_state.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
}
