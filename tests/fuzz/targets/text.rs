//! Prompts and templates: rendered, tokenized and hashed, whole and step by step.

use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

use prefix::{
    ChatBody, ChatBodyLayout, ChatEndpoint, ConversationCache, ConversationQuery, ExtraPromptInputs, ModelFiles,
    ModelTokenizer, ModelTokenizerSource, PromptResolver, PromptResolverOptions, PromptWorkLimits, WallTime,
};
use vocabulary::{Bytes, HashSeed, ModelNamespace, Tokens};

/// Far less than in production, so that what is not bounded shows.
const SMALL_LIMITS: PromptWorkLimits = PromptWorkLimits {
    rendered_bytes: Bytes(1 << 20),
    template_steps: 200_000,
    prompts: 64,
    segment_cache: Bytes(1 << 20),
};
/// A template is rendered some hundred times while it is judged, so a few steps are what one rendering has.
const TEMPLATE_CHECK_LIMITS: PromptWorkLimits = PromptWorkLimits { template_steps: 20_000, ..SMALL_LIMITS };
/// One of each way in which templates treat earlier turns.
const MODELS: [&str; 4] = ["chatml", "qwen_like", "llama_like", "harmony"];

static IDENTIFIERS: LazyLock<Vec<PromptResolver>> = LazyLock::new(|| MODELS.map(|name| identifier(files(name))).into());

fn folder(name: &str) -> PathBuf {
    // The programs are built two folders below the root, the tests one.
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let root =
        here.ancestors().find(|folder| folder.join("router/prefix/testdata").is_dir()).expect("in the repository");
    root.join("router/prefix/testdata/models").join(name)
}

fn files(name: &str) -> ModelFiles<'static> {
    ModelFiles::read(&folder(name)).expect("a committed model")
}

fn identifier(files: ModelFiles<'_>) -> PromptResolver {
    let text =
        ModelTokenizer::load_with_limits(ModelTokenizerSource::Files(files), SMALL_LIMITS).expect("a model that loads");
    let namespace = ModelNamespace { model: "m".into(), revision: "".into(), tokenizer: "".into() };
    let text = Some(Arc::new(text));
    PromptResolver::new(PromptResolverOptions {
        namespace,
        seed: HashSeed(1),
        block_size: Tokens(4),
        text,
        limits: SMALL_LIMITS,
    })
}

/// Two bodies of one conversation, a line each: a step that is grown is what it is when it is computed as a whole.
pub fn prompts(bytes: &[u8]) {
    let (first, second) = match bytes.iter().position(|byte| *byte == b'\n') {
        Some(at) => (&bytes[..at], &bytes[at + 1..]),
        None => (bytes, bytes),
    };
    let inputs = ExtraPromptInputs { now: WallTime::default(), ..ExtraPromptInputs::default() };
    for identifier in IDENTIFIERS.iter() {
        let conversations = ConversationCache::new(Bytes(1 << 20));
        let memory = ConversationQuery { cache: &conversations, tenant: "t", session: Some(1) };
        let begun =
            ChatBodyLayout::read(first).map(|layout| identifier.resolve_and_cache(layout, inputs, None, memory));
        let whole = identifier.resolve_chat(second, inputs);
        let checkpoint = begun.and_then(|begun| begun.next_checkpoint);
        let resumed = identifier.resolve_conversation(ChatEndpoint::Chat, second, (inputs, checkpoint.as_ref()));
        assert_eq!(resumed.prompt.chain, whole.chain, "from a checkpoint");
        if let Some(grown) = ChatBodyLayout::read(second).and_then(|layout| identifier.extend(layout, inputs, memory)) {
            assert_eq!(grown.prompt.chain, whole.chain, "along a trail");
        }
        identifier.resolve_completion(second, inputs);
        for form in [ChatEndpoint::Messages, ChatEndpoint::Responses] {
            check_converted(identifier, form, (first, second));
        }
    }
}

/// The same of bodies that become chat requests first.
fn check_converted(resolver: &PromptResolver, endpoint: ChatEndpoint, (first, second): (&[u8], &[u8])) {
    let conversations = ConversationCache::new(Bytes(1 << 20));
    let memory = ConversationQuery { cache: &conversations, tenant: "t", session: Some(1) };
    let chat = |body| resolver.convert(endpoint, body).and_then(Result::ok);
    if let Some(first) = chat(first) {
        resolver.resolve_and_cache(first.layout(), ExtraPromptInputs::default(), None, memory);
    }
    let whole = resolver.resolve_conversation(endpoint, second, (ExtraPromptInputs::default(), None)).prompt;
    let grown = chat(second).and_then(|second| resolver.extend(second.layout(), ExtraPromptInputs::default(), memory));
    assert!(grown.is_none_or(|grown| grown.prompt.chain == whole.chain), "along a trail of {endpoint:?}");
}

/// A model's template: loaded, judged, and rendered over a conversation with tools.
pub fn templates(bytes: &[u8]) {
    static TINY: LazyLock<ModelFiles<'static>> = LazyLock::new(|| files("chatml"));
    static CHAT: LazyLock<ChatBody> = LazyLock::new(|| {
        let body = r#"{"messages":[{"role":"system","content":"s"},{"role":"user","content":[{"type":"text","text":"a"}]},
            {"role":"assistant","content":null,"tool_calls":[{"id":"1","type":"function","function":{"name":"f",
            "arguments":"{\"x\":1}"}}]},{"role":"tool","tool_call_id":"1","content":"r"},{"role":"user","content":"b"}],
            "tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}]}"#;
        ChatBody::parse(body.as_bytes()).expect("a body that parses")
    });
    // The engine multiplies texts and lists up to a hundred million: a template is the operator's own file.
    if bytes.split(|byte| !byte.is_ascii_digit()).any(|number| number.len() > 4) {
        return;
    }
    let files = ModelFiles { chat_template: Some(bytes.into()), ..TINY.clone() };
    let Ok(text) = ModelTokenizer::load_with_limits(ModelTokenizerSource::Files(files), TEMPLATE_CHECK_LIMITS) else {
        return;
    };
    if let Ok(rendered) = text.render(&CHAT, WallTime::default()) {
        assert!(rendered.len() as u64 <= SMALL_LIMITS.rendered_bytes.0, "{} bytes", rendered.len());
    }
}
