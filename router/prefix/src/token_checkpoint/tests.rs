use std::path::Path;
use std::sync::LazyLock;

use proptest::prelude::*;

use super::*;
use crate::{ChatBody, ModelFiles, ModelTokenizer, ModelTokenizerSource, SpecialTokens, WallTime};

const FOLDERS: [&str; 4] = [
    "../../configs/models/tiny",
    "testdata/models/llama_like",
    "testdata/models/qwen_like",
    "testdata/models/mistral_like",
];

/// Loaded on first use.
static MODELS: [LazyLock<ModelTokenizer>; 4] = [
    LazyLock::new(|| load(FOLDERS[0])),
    LazyLock::new(|| load(FOLDERS[1])),
    LazyLock::new(|| load(FOLDERS[2])),
    LazyLock::new(|| load(FOLDERS[3])),
];

fn load(folder: &str) -> ModelTokenizer {
    let files = ModelFiles::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join(folder)).unwrap();
    ModelTokenizer::load(ModelTokenizerSource::Files(files)).unwrap()
}

fn tokenize_from(model: &ModelTokenizer, text: &str, checkpoint: Option<&TokenCheckpoint>) -> TokenizedPrompt {
    tokenize(text, checkpoint, (model.tokenizer(), model.digest())).unwrap()
}

#[test]
fn every_committed_tokenizer_has_cut_tokens() {
    for (model, folder) in MODELS.iter().zip(FOLDERS) {
        assert!(!model.tokenizer().cut_tokens().is_empty(), "{folder}");
    }
}

#[test]
fn longer_prompt_resumes_at_the_cut_of_the_shorter_one() {
    let model = &MODELS[0];
    let (first, second) = ("<|im_start|>user\nhi<|im_end|>\n", "<|im_start|>assistant\nyes");
    let early = tokenize_from(model, &format!("{first}{second}"), None);
    assert_eq!(early.reused_tokens, Tokens::ZERO);
    let next = early.next_checkpoint.unwrap();
    assert_eq!(next.bytes, first.len());
    let late = format!("{first}{second}<|im_end|>\n<|im_start|>user\nand");
    let late_ids = model.encode(&late, SpecialTokens::Without).unwrap();
    let tokenized = tokenize_from(model, &late, Some(&next));
    assert_eq!((tokenized.ids, tokenized.reused_tokens), (late_ids, next.token_count()));
    assert!(tokenized.next_checkpoint.unwrap().token_count() > next.token_count());
}

#[test]
fn checkpoint_of_another_text_tokenizer_or_offset_is_ignored() {
    let model = &MODELS[0];
    let text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>";
    let checkpoint = tokenize_from(model, text, None).next_checkpoint.unwrap();
    let known = |text: &str, checkpoint: &TokenCheckpoint, model: &ModelTokenizer| {
        tokenize_from(model, text, Some(checkpoint)).reused_tokens
    };
    assert_eq!(known(text, &checkpoint, model), checkpoint.token_count());
    assert_eq!(known(&text.replace("hi", "ho"), &checkpoint, model), Tokens::ZERO);
    assert_eq!(known(&text.replace("<|im_start|>", "<|im_end|>"), &checkpoint, model), Tokens::ZERO);
    assert_eq!(known(text, &checkpoint, &MODELS[2]), Tokens::ZERO, "another tokenizer with the same tokens");
    assert_eq!(known("", &checkpoint, model), Tokens::ZERO);
    // Plain text follows the checkpoint directly: it might form one word with what was cut off.
    let plain = format!("{}plain", &text[..checkpoint.bytes]);
    assert_eq!(known(&plain, &checkpoint, model), Tokens::ZERO);
    for (bytes, digest) in [(checkpoint.bytes + 1, checkpoint.digest), (usize::MAX, 0), (0, 0)] {
        assert_eq!(known(text, &TokenCheckpoint { bytes, digest, ..checkpoint.clone() }, model), Tokens::ZERO);
    }
}

#[test]
fn resuming_from_a_checkpoint_rejects_what_full_encoding_rejects() {
    let model = &MODELS[0];
    // Just long enough to fill a window of the whole text, but not of the part.
    let text = format!("<|im_start|>{}<|im_end|>", "x".repeat((128 << 10) - 1));
    assert!(model.encode(&text, SpecialTokens::Without).is_err());
    assert!(tokenize(&text, None, (model.tokenizer(), model.digest())).is_err());
}

#[test]
fn tokens_that_may_span_a_cut_are_not_cut_tokens() {
    let mut files = ModelFiles::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join(FOLDERS[0])).unwrap();
    let mut json: serde_json::Value = serde_json::from_slice(&files.tokenizer_json).unwrap();
    let added = json["added_tokens"].as_array_mut().unwrap();
    let mut more = |id: u32, content: &str| {
        let mut token = added[0].clone();
        (token["id"], token["content"]) = (id.into(), content.into());
        added.push(token);
    };
    more(9_000, "\n<|im_start|>");
    more(9_001, "|><|im_e");
    more(9_002, "<<a<<");
    more(9_003, "<|fine|>");
    files.tokenizer_json = serde_json::to_vec(&json).unwrap().into();
    let model = ModelTokenizer::load(ModelTokenizerSource::Files(files)).unwrap();
    let cuts: Vec<&str> = model.tokenizer().cut_tokens().iter().map(|token| &**token).collect();
    assert_eq!(cuts, Vec::<&str>::new(), "the end of <|im_end|> begins another one, and so do all of its kind");
}

fn pieces() -> impl Strategy<Value = Vec<String>> {
    let special = prop::sample::select(vec![
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<think>",
        "</think>",
        "<tool_call>",
        "<s>",
        "</s>",
        "[INST]",
        "[/INST]",
        "[TOOL_CALLS]",
        "<|begin_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|im_",
        "<|",
        "|>",
        "[",
        "<",
        "<unk>",
    ]);
    let text = "\\PC{0,12}|[ \\n\\t]{0,4}|[a-z ]{0,20}|[0-9]{0,6}|e\u{301}|\u{338}|▁{0,2}";
    prop::collection::vec(prop_oneof![special.prop_map(str::to_owned), text.prop_map(|text: String| text)], 0..24)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(160))]

    #[test]
    fn tokenizing_in_parts_equals_tokenizing_the_whole(pieces in pieces(), steps in prop::collection::vec(0usize..24, 0..4)) {
        for model in MODELS.iter() {
            let mut known: Option<TokenCheckpoint> = None;
            let mut ends: Vec<usize> = steps.iter().map(|step| (*step).min(pieces.len())).collect();
            ends.sort_unstable();
            // Each step is a longer prompt of the same conversation, tokenized from the previous step's checkpoint.
            for end in ends.into_iter().chain([pieces.len()]) {
                let text = pieces[..end].concat();
                let tokenized = tokenize_from(model, &text, known.as_ref());
                prop_assert_eq!(&tokenized.ids, &model.encode(&text, SpecialTokens::Without).unwrap(), "{:?}", text);
                known = tokenized.next_checkpoint.or(known);
            }
        }
    }

    #[test]
    fn foreign_checkpoint_never_changes_token_ids(mine in pieces(), other in pieces()) {
        for model in MODELS.iter() {
            let checkpoint = tokenize_from(model, &mine.concat(), None).next_checkpoint;
            let text = other.concat();
            let tokenized = tokenize_from(model, &text, checkpoint.as_ref());
            prop_assert_eq!(&tokenized.ids, &model.encode(&text, SpecialTokens::Without).unwrap(), "{:?}", text);
        }
    }

    #[test]
    fn checkpoint_bytes_round_trip_and_other_bytes_are_ignored(pieces in pieces(), stored in prop::collection::vec(any::<u8>(), 0..60)) {
        for model in MODELS.iter() {
            if let Some(checkpoint) = tokenize_from(model, &pieces.concat(), None).next_checkpoint {
                let bytes = checkpoint.to_bytes().unwrap();
                prop_assert_eq!(TokenCheckpoint::from_bytes(&bytes), Some(checkpoint));
                prop_assert_eq!(TokenCheckpoint::from_bytes(&bytes[..bytes.len() - 1]), None);
            }
        }
        if let Some(checkpoint) = TokenCheckpoint::from_bytes(&stored) {
            let text = pieces.concat();
            prop_assert_eq!(tokenize_from(&MODELS[0], &text, Some(&checkpoint)).reused_tokens, Tokens::ZERO);
        }
    }
}

#[test]
fn incremental_ids_match_full_ids_on_committed_conversations() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/conversations.json");
    let chats: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let mut steps_from_a_checkpoint = 0;
    for chat in chats["chats"].as_array().unwrap() {
        let messages = chat["body"]["messages"].as_array().unwrap();
        for model in MODELS.iter() {
            let mut known: Option<TokenCheckpoint> = None;
            for turns in 1..=messages.len() {
                let mut body = chat["body"].clone();
                body["messages"] = messages[..turns].into();
                let Ok(body) = ChatBody::parse(body.to_string().as_bytes()) else { continue };
                let Ok(whole) = model.encode_chat(&body, WallTime::default()) else { continue };
                let tokenized = model.encode_chat_from_checkpoint(&body, WallTime::default(), known.as_ref()).unwrap();
                assert_eq!(tokenized.ids, whole, "{} with {turns} turns", chat["name"]);
                steps_from_a_checkpoint += u32::from(tokenized.reused_tokens > Tokens::ZERO);
                known = tokenized.next_checkpoint.or(known);
            }
        }
    }
    assert!(steps_from_a_checkpoint > 20, "{steps_from_a_checkpoint}");
}
