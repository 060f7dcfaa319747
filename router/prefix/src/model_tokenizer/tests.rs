use std::path::{Path, PathBuf};

use super::*;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/models/tiny")
}

fn files() -> ModelFiles<'static> {
    ModelFiles::read(&folder()).unwrap()
}

fn load(files: ModelFiles<'_>) -> Result<ModelTokenizer, PrefixError> {
    ModelTokenizer::load(ModelTokenizerSource::Files(files))
}

fn bytes(text: &str) -> Option<Cow<'static, [u8]>> {
    Some(text.as_bytes().to_vec().into())
}

fn hello() -> ChatBody {
    ChatBody::parse(br#"{"messages":[{"role":"user","content":"hi"}]}"#).unwrap()
}

#[test]
fn loading_a_folder_equals_loading_its_bytes() {
    let from_folder = ModelTokenizer::load(ModelTokenizerSource::Folder(folder())).unwrap();
    let from_bytes = load(files()).unwrap();
    assert_eq!(from_folder.digest(), from_bytes.digest());
    assert!(from_folder.digest().starts_with("xxh3:"));
    assert_eq!((from_folder.vocab_size(), from_folder.end_token_ids()), (4096, &[2][..]));
    assert_eq!(from_folder.special_ids().collect::<Vec<_>>(), [0, 1, 2]);
    assert!(from_folder.is_special(2) && !from_folder.is_special(3));
    assert_eq!(from_folder.token_id("<|im_start|>"), Some(1));
}

#[test]
fn digest_covers_everything_that_determines_token_ids() {
    let config = r#"{"eos_token":"<|im_end|>","bos_token":"<s>"}"#;
    let changed = [
        ModelFiles { chat_template: bytes("{{ messages[0].content }}"), ..files() },
        ModelFiles { tokenizer_config: bytes(config), ..files() },
        ModelFiles { chat_template: None, ..files() },
        files(),
    ];
    let mut digests: Vec<_> = changed.into_iter().map(|files| load(files).unwrap().digest().clone()).collect();
    digests.sort();
    digests.dedup();
    assert_eq!(digests.len(), 4);
}

#[test]
fn missing_folder_error_names_a_remedy() {
    let error = ModelTokenizer::load(ModelTokenizerSource::Folder("/nonexistent/model".into())).unwrap_err();
    assert!(error.to_string().contains("/nonexistent/model/tokenizer.json"), "{error}");
    assert!(error.to_string().contains("point the model's folder"), "{error}");
}

#[test]
fn only_the_tokenizer_file_is_required() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("tokenizer.json"), &*files().tokenizer_json).unwrap();
    let text = ModelTokenizer::load(ModelTokenizerSource::Folder(folder.path().into())).unwrap();
    assert!(text.end_token_ids().is_empty());
    assert_eq!(text.render(&hello(), WallTime::default()).unwrap_err().reason(), FallbackReason::UnsupportedTemplate);
}

#[test]
fn errors_name_the_broken_file() {
    let broken = |change: fn(&mut ModelFiles<'static>)| {
        let mut files = files();
        change(&mut files);
        load(files).unwrap_err().to_string()
    };
    assert!(broken(|files| files.tokenizer_json = b"{".to_vec().into()).contains("tokenizer.json"));
    assert!(broken(|files| files.tokenizer_json = b"{}".to_vec().into()).contains("tokenizer"));
    assert!(broken(|files| files.tokenizer_config = bytes("[")).contains("tokenizer_config.json"));
    assert!(broken(|files| files.config = bytes("x")).contains("config.json"));
    assert!(broken(|files| files.chat_template = bytes("{% for %}")).contains("chat template"));
}

#[test]
fn tokenizer_that_does_not_round_trip_is_rejected() {
    let json = String::from_utf8(files().tokenizer_json.into_owned()).unwrap();
    let lossy = json.replace("\"decoder\": {\n    \"type\": \"ByteLevel\"", "\"decoder\": {\n    \"type\": \"Fuse\"");
    assert_ne!(json, lossy);
    let error = load(ModelFiles { tokenizer_json: lossy.into_bytes().into(), ..files() }).unwrap_err();
    assert!(matches!(error, PrefixError::RoundTrip { .. }), "{error}");
}

#[test]
fn template_is_read_from_its_own_file_or_the_config() {
    let render = |files| load(files).unwrap().render(&hello(), WallTime::default()).unwrap();
    let config = |template: &str| bytes(&format!(r#"{{"eos_token":{{"content":"E"}},"chat_template":{template}}}"#));
    let own = bytes("own {{ eos_token }}");
    let inline = config(r#""inline {{ eos_token }}{{ bos_token }}""#);
    let named = config(r#"[{"name":"default","template":"named"},{"name":"tool_use","template":"tools"}]"#);
    assert_eq!(render(ModelFiles { chat_template: own, tokenizer_config: inline.clone(), ..files() }), "own E");
    assert_eq!(render(ModelFiles { chat_template: None, tokenizer_config: inline, ..files() }), "inline E");
    assert_eq!(render(ModelFiles { chat_template: None, tokenizer_config: named, ..files() }), "named");
}

#[test]
fn models_rendered_without_jinja_have_no_template() {
    let text = load(ModelFiles { config: bytes(r#"{"model_type":"gpt_oss"}"#), ..files() }).unwrap();
    assert_eq!(text.render(&hello(), WallTime::default()).unwrap_err().reason(), FallbackReason::UnsupportedTemplate);
}

#[test]
fn end_tokens_come_from_the_generation_config_and_eos_token() {
    let generation_config = bytes(r#"{"eos_token_id":[0,1]}"#);
    assert_eq!(load(ModelFiles { generation_config, ..files() }).unwrap().end_token_ids(), [0, 1, 2]);
    let config = bytes(r#"{"eos_token_id":null}"#);
    let special_tokens_map = bytes(r#"{"eos_token":"<|endoftext|>"}"#);
    let files = ModelFiles { config, special_tokens_map, tokenizer_config: None, ..files() };
    assert_eq!(load(files).unwrap().end_token_ids(), [0]);
}

#[test]
fn tokens_declared_only_in_the_config_are_added() {
    let declared = r#"{"added_tokens_decoder":{"4096":{"content":"<|extra|>","special":true,"lstrip":false,"rstrip":false,"normalized":false,"single_word":false},"2":{"content":"other","special":true}}}"#;
    let text = load(ModelFiles { tokenizer_config: bytes(declared), ..files() }).unwrap();
    assert_eq!(text.encode("<|extra|>", SpecialTokens::Without).unwrap(), [4096]);
    assert_eq!(text.encode("<|im_end|>", SpecialTokens::Without).unwrap(), [2]);
}

#[test]
fn rendering_over_its_limit_is_too_large() {
    let limits = PromptWorkLimits { rendered_bytes: vocabulary::Bytes(100), ..PromptWorkLimits::default() };
    let text = ModelTokenizer::load_with_limits(ModelTokenizerSource::Files(files()), limits).unwrap();
    let body = format!(r#"{{"messages":[{{"role":"user","content":"{}"}}]}}"#, "x".repeat(200));
    let error = text.render(&ChatBody::parse(body.as_bytes()).unwrap(), WallTime::default()).unwrap_err();
    assert_eq!(error.reason(), FallbackReason::TooLarge, "{error}");
}
