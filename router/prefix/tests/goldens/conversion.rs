//! Compares the template inputs of chat, messages and responses requests with those of vLLM's own code.

use std::collections::HashMap;
use std::sync::Arc;

use prefix::{
    ChatEndpoint, FallbackReason, ModelFiles, ModelTokenizer, ModelTokenizerSource, PrefixError, PromptResolver,
    PromptResolverOptions, PromptWorkLimits, WallTime,
};
use serde::Deserialize;
use serde_json::value::RawValue;
use vocabulary::{HashSeed, ModelNamespace, Tokens};

use crate::recorded::folder;

#[derive(Deserialize)]
struct ConversionGolden {
    template: String,
    endpoint: String,
    body: Box<RawValue>,
    text: Option<String>,
    error: Option<String>,
}

fn echo(template: &str) -> PromptResolver {
    let mut files = ModelFiles::read(&folder("tiny")).unwrap();
    files.chat_template = Some(std::fs::read(folder(template).join("chat_template.jinja")).unwrap().into());
    let text = Some(Arc::new(ModelTokenizer::load(ModelTokenizerSource::Files(files)).unwrap()));
    let namespace = ModelNamespace { model: "echo".into(), revision: "".into(), tokenizer: "".into() };
    PromptResolver::new(PromptResolverOptions {
        namespace,
        seed: HashSeed(7),
        block_size: Tokens(16),
        text,
        limits: PromptWorkLimits::default(),
    })
}

fn shown(resolver: &PromptResolver, shape: &ConversionGolden) -> Result<String, PrefixError> {
    let body = shape.body.get().as_bytes();
    let chat = match shape.endpoint.as_str() {
        "messages" => resolver.chat_request(ChatEndpoint::Messages, body)?,
        "responses" => resolver.chat_request(ChatEndpoint::Responses, body)?,
        _ => resolver.chat_request(ChatEndpoint::Chat, body)?,
    };
    resolver.text().unwrap().render(&chat, WallTime::default())
}

#[test]
fn requests_of_all_endpoints_convert_as_in_vllm() {
    let json = std::fs::read(folder("").join("../shapes.json")).unwrap();
    let shapes: Vec<ConversionGolden> = serde_json::from_slice(&json).unwrap();
    let mut echoes = HashMap::new();
    let (mut wrong, mut refused) = (Vec::new(), 0);
    for shape in &shapes {
        let identifier = echoes.entry(shape.template.as_str()).or_insert_with_key(|template| echo(template));
        match (shown(identifier, shape), &shape.text) {
            (Ok(text), Some(expected)) if text == *expected => {}
            // A body that the engine rejects has no prompt; one whose prompt cannot be predicted is a fallback.
            (_, None) => assert!(shape.error.is_some()),
            (Err(error), Some(_)) if error.reason() == FallbackReason::UnsupportedOption => refused += 1,
            (other, expected) => {
                wrong.push(format!("{} {} {}:\n{other:?}\n{expected:?}", shape.template, shape.endpoint, shape.body));
            }
        }
    }
    assert!(wrong.is_empty(), "{} of {} differ\n{}", wrong.len(), shapes.len(), wrong.join("\n\n"));
    assert!(shapes.len() > 150 && refused < 10, "{refused} of {} could not be foreseen", shapes.len());
}
