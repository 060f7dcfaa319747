//! A tokenizer for tests: three special tokens, every byte, and words of a space and two letters.

use serde_json::Value;

use crate::sim::{ChatEnding, ChatPrompt, CodecError, TextCodec};

const SPECIALS: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];
const FIRST_BYTE: u32 = 3;
pub(super) const FIRST_WORD: u32 = 259;
pub(super) const WORDS: u32 = 26 * 26;

pub(super) struct Tiny;

impl TextCodec for Tiny {
    fn encode_chat(&self, chat: ChatPrompt<'_>) -> Result<Vec<u32>, CodecError> {
        let mut text = String::new();
        for message in chat.messages {
            let content = match &message["content"] {
                Value::String(text) => text.clone(),
                Value::Array(parts) => parts.iter().filter_map(|part| part["text"].as_str()).collect(),
                Value::Null => String::new(),
                _ => return Err(CodecError("content is neither text nor parts".to_owned())),
            };
            let role = message["role"].as_str().unwrap_or_default();
            text += &format!("<|im_start|>{role}\n{content}<|im_end|>\n");
        }
        match chat.ending {
            ChatEnding::Generate => text += "<|im_start|>assistant\n",
            ChatEnding::Continue => text.truncate(text.len() - "<|im_end|>\n".len()),
            ChatEnding::Closed => {}
        }
        self.encode(&text)
    }

    fn encode(&self, text: &str) -> Result<Vec<u32>, CodecError> {
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

#[test]
fn what_is_decoded_is_encoded_back() {
    let text = "<|im_start|>user\nhé ab cd<|im_end|>\n ef";
    let ids = Tiny.encode(text).unwrap();
    assert_eq!(Tiny.decode(&ids), "user\nhé ab cd\n ef");
    let words = super::words(3, 50);
    assert_eq!(Tiny.encode(&Tiny.decode(&words)).unwrap(), words);
}
