//! Transcripts of stored responses: input and output of a step, so that the next step can be served at another worker.
//!
//! Each transcript holds one step and names the one before it. If any part is not understood, no transcript is kept: a
//! transcript is always complete.

use bytes::Bytes;
use serde::Deserialize;
use serde_json::value::RawValue;
use vocabulary::SessionId;
use workers_shim::engine_api::{JsonSplice, ScannedJson, items};

use crate::error::ApiError;

/// Maximum number of steps in an assembled conversation.
const MAX_STEPS: usize = 512;

/// What a request adds to its conversation.
#[derive(Clone, Debug)]
pub(crate) struct ConversationAddition {
    previous: Option<String>,
    /// The session that the request belongs to, if known.
    session: Option<SessionId>,
    /// The items of its input, without the brackets.
    input: Bytes,
}

impl ConversationAddition {
    /// Reads a request's body; `None` when nothing is to be stored, or when the input is not valid.
    pub(crate) fn read(body: &Bytes) -> Option<Self> {
        let fields = ScannedJson::scan(body.clone(), &["input", "previous_response_id", "store"]).ok()?;
        if fields.read::<bool>("store") == Some(false) {
            return None;
        }
        let input = items::input_items(fields.get("input")?)?;
        Some(Self { previous: fields.read("previous_response_id"), session: None, input })
    }

    /// Charges the copy of the input.
    pub(crate) fn charged(self, charge: impl FnOnce(Bytes) -> Result<Bytes, ApiError>) -> Result<Self, ApiError> {
        Ok(Self { input: charge(self.input)?, ..self })
    }

    /// Sets the session.
    pub(crate) fn with_session(self, session: Option<SessionId>) -> Self {
        Self { session, ..self }
    }

    /// Returns the bytes of the input.
    pub(crate) fn bytes(&self) -> usize {
        self.input.len()
    }

    /// Returns the transcript of this request and its answer: `{"previous": ID, "session": ID, "items": [...]}`.
    pub(crate) fn transcript_with(&self, output: &RawValue) -> Option<Bytes> {
        let previous = serde_json::to_vec(&self.previous).ok()?;
        let items = items::joined([&self.input[..], items::list_content(output.get())?.as_bytes()]);
        let session = serde_json::to_vec(&self.session.map(|session| session.to_string())).ok()?;
        let mut text = Vec::with_capacity(items.len() + previous.len() + session.len() + 44);
        for part in [&b"{\"previous\":"[..], &previous, b",\"session\":", &session, b",\"items\":[", &items, b"]}"] {
            text.extend_from_slice(part);
        }
        Some(text.into())
    }
}

/// A response object in an answer.
#[derive(Deserialize)]
pub(crate) struct ResponseObject<'a> {
    pub(crate) id: String,
    status: Option<String>,
    #[serde(borrow)]
    pub(crate) output: &'a RawValue,
}

impl<'a> ResponseObject<'a> {
    /// Reads a response that has ended with an output; `None` if it is not finished, or failed.
    pub(crate) fn read(text: &'a [u8]) -> Option<Self> {
        let origin: Self = serde_json::from_slice(text).ok()?;
        matches!(origin.status.as_deref(), None | Some("completed" | "incomplete")).then_some(origin)
    }

    /// Reads the response in a stream's last event.
    pub(crate) fn read_event(text: &'a [u8]) -> Option<Self> {
        #[derive(Deserialize)]
        struct ResponseEvent<'a> {
            #[serde(borrow)]
            response: &'a RawValue,
        }
        let event: ResponseEvent<'a> = serde_json::from_slice(text).ok()?;
        Self::read(event.response.get().as_bytes())
    }
}

#[derive(Deserialize)]
struct StoredTranscript<'a> {
    previous: Option<String>,
    #[serde(borrow)]
    items: &'a RawValue,
}

/// The position of a transcript in its conversation.
#[derive(Deserialize)]
pub(crate) struct TranscriptHeader {
    /// Id of the previous response.
    pub(crate) previous: Option<String>,
    session: Option<String>,
}

impl TranscriptHeader {
    /// Reads it from a transcript; `None` where that is malformed.
    pub(crate) fn read(transcript: &[u8]) -> Option<Self> {
        serde_json::from_slice(transcript).ok()
    }

    /// Returns the session that the transcript belongs to.
    pub(crate) fn session(&self) -> Option<SessionId> {
        self.session.as_ref()?.parse().ok()
    }
}

/// A conversation being assembled, the newest step first.
#[derive(Debug)]
pub(crate) struct ConversationHistory {
    max_bytes: usize,
    bytes: usize,
    steps: Vec<Bytes>,
}

/// What a transcript says about the step before it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum PreviousStep {
    /// There is no previous step: the history is complete.
    Start,
    Response(String),
}

impl ConversationHistory {
    /// Copies of the whole conversation that [`Self::into_body`] makes: the items, the list of them, and the body.
    pub(crate) const COPIES: usize = 3;

    /// Returns an empty history that holds at most `max_bytes` bytes.
    pub(crate) fn new(max_bytes: usize) -> Self {
        Self { max_bytes, bytes: 0, steps: Vec::new() }
    }

    /// Returns the bytes that it holds.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Adds the step before the ones it holds; `None` when the transcript is malformed, or a limit is exceeded.
    pub(crate) fn add(&mut self, transcript: &Bytes) -> Option<PreviousStep> {
        let stored: StoredTranscript<'_> = serde_json::from_slice(transcript).ok()?;
        let items = items::list_content(stored.items.get())?;
        self.bytes += items.len() + 1;
        if self.bytes > self.max_bytes || self.steps.len() == MAX_STEPS {
            return None;
        }
        self.steps.push(transcript.slice_ref(items.as_bytes()));
        Some(stored.previous.map_or(PreviousStep::Start, PreviousStep::Response))
    }

    /// Returns `body` with the whole history as its input, and without a previous response.
    pub(crate) fn into_body(self, body: &Bytes) -> Option<Bytes> {
        let fields = ScannedJson::scan(body.clone(), &["input", "previous_response_id"]).ok()?;
        let own = items::input_items(fields.get("input")?)?;
        let items = items::joined(self.steps.iter().rev().map(|step| &step[..]).chain([&own[..]]));
        let mut splice = JsonSplice::new(&fields);
        splice.set("input", [b"[", &items[..], b"]"].concat());
        splice.remove("previous_response_id");
        Some(splice.finish())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn bytes(value: &Value) -> Bytes {
        serde_json::to_vec(value).unwrap().into()
    }

    fn transcript(request: &Value, output: &Value) -> Option<Bytes> {
        let output = serde_json::value::to_raw_value(output).unwrap();
        ConversationAddition::read(&bytes(request))?.transcript_with(&output)
    }

    #[test]
    fn a_history_joins_its_steps_and_leaves_other_fields_unchanged() {
        let first = transcript(&json!({"input": "one"}), &json!([{"type": "message", "id": "m1"}])).unwrap();
        let second = json!({"input": [{"role": "user", "content": "two"}], "previous_response_id": "resp_1"});
        let second = transcript(&second, &json!([])).unwrap();
        let mut history = ConversationHistory::new(10_000);
        assert_eq!(history.add(&second), Some(PreviousStep::Response("resp_1".into())));
        assert_eq!(history.add(&first), Some(PreviousStep::Start));
        let body = json!({"model": "m", "previous_response_id": "resp_2", "input": "three", "temperature": 0.0});
        let body: Value = serde_json::from_slice(&history.into_body(&bytes(&body)).unwrap()).unwrap();
        assert_eq!(
            body,
            json!({"model": "m", "temperature": 0.0, "input": [
                {"role": "user", "content": "one"}, {"type": "message", "id": "m1"},
                {"role": "user", "content": "two"}, {"role": "user", "content": "three"},
            ]})
        );
    }

    #[test]
    fn unstored_or_invalid_input_has_no_transcript() {
        for request in [json!({"input": "x", "store": false}), json!({"input": 7}), json!({}), json!({"input": null})] {
            assert_eq!(transcript(&request, &json!([])), None, "{request}");
        }
        assert!(transcript(&json!({"input": []}), &json!([])).is_some());
        assert_eq!(transcript(&json!({"input": "x"}), &json!({"not": "a list"})), None);
    }

    #[test]
    fn only_a_completed_response_is_stored() {
        let told = |status: &str| {
            let text = json!({"id": "resp_1", "status": status, "output": []}).to_string();
            ResponseObject::read(text.as_bytes()).is_some()
        };
        let ended = ["completed", "incomplete", "in_progress", "queued", "failed", "cancelled"].map(told);
        assert_eq!(ended, [true, true, false, false, false, false]);
        let event =
            json!({"response": {"id": "resp_1", "status": "completed", "output": [1]}, "type": "x"}).to_string();
        assert_eq!(ResponseObject::read_event(event.as_bytes()).unwrap().output.get(), "[1]");
    }

    #[test]
    fn a_history_is_bounded() {
        let step = transcript(&json!({"input": "x".repeat(100), "previous_response_id": "p"}), &json!([])).unwrap();
        let mut history = ConversationHistory::new(300);
        assert!(history.add(&step).is_some());
        assert!(history.add(&step).is_some());
        assert_eq!(history.add(&step), None);
        let small = transcript(&json!({"input": [], "previous_response_id": "p"}), &json!([])).unwrap();
        let mut history = ConversationHistory::new(1 << 20);
        (0..MAX_STEPS).for_each(|_| assert!(history.add(&small).is_some()));
        assert_eq!(history.add(&small), None);
    }

    proptest! {
        #[test]
        fn steps_are_restored_in_order(
            steps in prop::collection::vec((prop::collection::vec("\\PC{0,12}", 0..4), prop::collection::vec("\\PC{0,12}", 0..3)), 0..6),
            last in "\\PC{0,12}",
        ) {
            let mut expected = Vec::new();
            let mut history = ConversationHistory::new(1 << 20);
            let mut transcripts = Vec::new();
            for (input, output) in &steps {
                expected.extend(input.iter().chain(output).map(|text| json!({"content": text})));
                let items = |texts: &[String]| texts.iter().map(|text| json!({"content": text})).collect::<Value>();
                transcripts.push(transcript(&json!({"input": items(input)}), &items(output)).unwrap());
            }
            expected.push(json!({"role": "user", "content": last}));
            transcripts.iter().rev().for_each(|step| assert!(history.add(step).is_some()));
            let body = history.into_body(&bytes(&json!({"input": last}))).unwrap();
            let body: Value = serde_json::from_slice(&body).unwrap();
            prop_assert_eq!(&body["input"], &Value::Array(expected));
        }

        #[test]
        fn malformed_stored_bytes_do_not_panic(stored in prop::collection::vec(any::<u8>(), 0..60), text in "[\\[\\]{}\":,a-z]{0,40}") {
            for bytes in [Bytes::from(stored), Bytes::from(text)] {
                drop(ConversationHistory::new(1000).add(&bytes));
                drop(ConversationAddition::read(&bytes));
                drop(ResponseObject::read(&bytes));
                drop(ResponseObject::read_event(&bytes));
            }
        }
    }
}
