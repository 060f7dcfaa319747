//! Request bodies of simulated agents: small ones are single requests, larger ones are sessions whose history grows
//! by 1 to 2 KB per step.

use crate::worker::{MODEL, SHAPE_MARK};

const WORDS: [&str; 16] = [
    "the ",
    "function ",
    "returns ",
    "when ",
    "cache ",
    "block ",
    "prefix\\n",
    "error: ",
    "self.inner ",
    "42 ",
    "\\\"quoted\\\" ",
    "src/main.rs ",
    "é ",
    "日本 ",
    "await?; ",
    "--- ",
];
/// Minimum body size in bytes of a session; smaller bodies are single requests.
const MIN_SESSION_BODY: usize = 4 << 10;

/// Shape of the worker's response.
#[derive(Clone, Copy)]
pub(crate) struct AnswerShape {
    /// Number of streamed events.
    pub(crate) events: usize,
    /// Pause between two events, in microseconds.
    pub(crate) pause_us: u64,
}

/// Step bodies of one client, one session after the other.
pub(crate) struct StepBodies {
    size: usize,
    answering: AnswerShape,
    client: usize,
    session: usize,
    history: String,
    seed: u64,
}

impl StepBodies {
    /// Creates the bodies of a client; `size` is their average in bytes.
    pub(crate) fn new(client: usize, size: usize, answering: AnswerShape) -> StepBodies {
        let seed = (client as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        StepBodies { size, answering, client, session: 0, history: String::new(), seed }
    }

    /// Session name of the last body.
    pub(crate) fn session(&self) -> String {
        format!("bench-{}-{}-{}", self.size, self.client, self.session)
    }

    /// Returns the next body.
    pub(crate) fn next_body(&mut self) -> Vec<u8> {
        let restart = self.size < MIN_SESSION_BODY || self.history.len() > self.size + self.size / 4;
        if restart || self.history.is_empty() {
            self.session += 1;
            self.history.clear();
            let start = if self.size < MIN_SESSION_BODY { self.size.saturating_sub(200) } else { self.size * 3 / 4 };
            self.turn("system", start);
        } else {
            let more = 512 + (self.random() % 512) as usize;
            self.turn("assistant", more);
            self.turn("user", more);
        }
        let events = self.answering.events;
        let head = format!(r#"{{"max_tokens":{events},"model":"{MODEL}","stream":true,"messages":["#);
        [head.as_bytes(), self.history.as_bytes(), b"]}"].concat()
    }

    fn turn(&mut self, role: &str, bytes: usize) {
        if !self.history.is_empty() {
            self.history.push(',');
        }
        self.history.push_str(&format!(r#"{{"role":"{role}","content":""#));
        if role == "system" {
            // The worker reads the response shape here: some routers drop fields that they do not know.
            let AnswerShape { events, pause_us } = self.answering;
            self.history.push_str(&format!("{SHAPE_MARK}events={events} pause_us={pause_us}] "));
        }
        let end = self.history.len() + bytes;
        while self.history.len() < end {
            let word = WORDS[(self.random() >> 33) as usize % WORDS.len()];
            self.history.push_str(word);
        }
        self.history.push_str("\"}");
    }

    fn random(&mut self) -> u64 {
        self.seed ^= self.seed << 13;
        self.seed ^= self.seed >> 7;
        self.seed ^= self.seed << 17;
        self.seed
    }
}
