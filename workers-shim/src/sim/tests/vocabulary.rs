//! A tokenizer for tests: three special tokens, all bytes, and words of a space and two letters.

use serde::Deserialize;
use serde_json::Value;

use crate::sim::{AddSpecialTokens, ConversationApi, TextCodec, TextCodecError};

const SPECIALS: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];
const FIRST_BYTE: u32 = 3;
pub(super) const FIRST_WORD: u32 = 259;
pub(super) const WORDS: u32 = 26 * 26;

pub(super) struct TinyTokenizer;

impl TextCodec for TinyTokenizer {
    fn encode_chat(&self, api: ConversationApi, body: &[u8]) -> Result<Vec<u32>, TextCodecError> {
        let body: Value = serde_json::from_slice(body).map_err(|error| TextCodecError(error.to_string()))?;
        let (system, turns) = match api {
            ConversationApi::Chat => (None, &body["messages"]),
            ConversationApi::Messages => (body.get("system"), &body["messages"]),
            ConversationApi::Responses => (body.get("instructions"), &body["input"]),
        };
        let mut said: Vec<(String, String)> = Vec::new();
        if let Some(system) = system {
            said.push(("system".to_owned(), text_of(system)?));
        }
        if let Some(text) = turns.as_str() {
            said.push(("user".to_owned(), text.to_owned()));
        }
        for turn in turns.as_array().into_iter().flatten() {
            said.push((turn["role"].as_str().unwrap_or_default().to_owned(), text_of(&turn["content"])?));
        }
        let mut text: String =
            said.iter().map(|(role, content)| format!("<|im_start|>{role}\n{content}<|im_end|>\n")).collect();
        if body["continue_final_message"] == true {
            text.truncate(text.len() - "<|im_end|>\n".len());
        } else if body["add_generation_prompt"] != false {
            text += "<|im_start|>assistant\n";
        }
        self.encode(&text, AddSpecialTokens::Bare)
    }

    fn encode_completion(&self, body: &[u8]) -> Result<Vec<Vec<u32>>, TextCodecError> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum PromptInput {
            Text(String),
            Ids(Vec<u32>),
            Batch(Vec<PromptInput>),
        }
        #[derive(Deserialize)]
        struct PromptBody {
            prompt: PromptInput,
        }
        let one = |prompt| match prompt {
            PromptInput::Text(text) => self.encode(&text, AddSpecialTokens::Framed),
            PromptInput::Ids(ids) => Ok(ids),
            PromptInput::Batch(_) => Err(TextCodecError("a batch in a batch".to_owned())),
        };
        match serde_json::from_slice::<PromptBody>(body).map_err(|error| TextCodecError(error.to_string()))?.prompt {
            PromptInput::Batch(prompts) => prompts.into_iter().map(one).collect(),
            prompt => Ok(vec![one(prompt)?]),
        }
    }

    fn encode(&self, text: &str, _: AddSpecialTokens) -> Result<Vec<u32>, TextCodecError> {
        let (mut ids, mut rest) = (Vec::new(), text.as_bytes());
        while let Some(first) = rest.first() {
            let special = SPECIALS.iter().position(|special| rest.starts_with(special.as_bytes()));
            let (id, length) = match (special, rest) {
                (Some(at), _) => (at as u32, SPECIALS[at].len()),
                (None, [b' ', a @ b'a'..=b'z', b @ b'a'..=b'z', after @ ..])
                    if !after.first().is_some_and(u8::is_ascii_lowercase) =>
                {
                    (FIRST_WORD + u32::from(a - b'a') * 26 + u32::from(b - b'a'), 3)
                }
                _ => (FIRST_BYTE + u32::from(*first), 1),
            };
            ids.push(id);
            rest = &rest[length..];
        }
        Ok(ids)
    }

    fn decode(&self, tokens: &[u32]) -> String {
        let mut bytes = Vec::new();
        for id in tokens {
            match *id {
                0..FIRST_BYTE => {}
                FIRST_BYTE..FIRST_WORD => bytes.push((id - FIRST_BYTE) as u8),
                word => {
                    let word = word - FIRST_WORD;
                    bytes.extend([b' ', b'a' + (word / 26) as u8, b'a' + (word % 26) as u8]);
                }
            }
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn vocabulary_size(&self) -> u32 {
        FIRST_WORD + WORDS
    }

    fn eos(&self) -> u32 {
        2
    }

    fn specials(&self) -> Vec<u32> {
        vec![0, 1, 2]
    }
}

fn text_of(content: &Value) -> Result<String, TextCodecError> {
    match content {
        Value::String(text) => Ok(text.clone()),
        Value::Array(parts) => Ok(parts.iter().filter_map(|part| part["text"].as_str()).collect()),
        Value::Null => Ok(String::new()),
        _ => Err(TextCodecError("content is neither text nor parts".to_owned())),
    }
}

#[test]
fn decode_then_encode_round_trips() {
    let text = "<|im_start|>user\nhé ab cd<|im_end|>\n ef";
    let ids = TinyTokenizer.encode(text, AddSpecialTokens::Bare).unwrap();
    assert_eq!(TinyTokenizer.decode(&ids), "user\nhé ab cd\n ef");
    let words = super::words(3, 50);
    assert_eq!(TinyTokenizer.encode(&TinyTokenizer.decode(&words), AddSpecialTokens::Bare).unwrap(), words);
}
