//! `/v1/embeddings`, `/v1/rerank`, `/v1/score`, with numbers that depend only on the tokens.

use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use base64::prelude::{BASE64_STANDARD, Engine as _};
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::sim::codec::AddSpecialTokens;

use super::SimState;
use super::errors::ErrorResponse;
use super::request_fields::{RequestFields, token_ids, wrong};

/// Dimensions of an embedding.
const EMBEDDING_WIDTH: u64 = 64;
/// Maximum number of texts per request.
const MAX_INPUTS: usize = 1024;

pub(crate) async fn embeddings(State(app): State<Arc<SimState>>, body: Bytes) -> Result<Json<Value>, ErrorResponse> {
    let fields = RequestFields::parse(&body)?;
    let model = model_of(&app, &fields)?;
    let inputs = inputs_of(&app, fields.required("input")?)?;
    let packed = match fields.text("encoding_format")? {
        None | Some("float") => false,
        Some("base64") => true,
        Some(_) => return Err(wrong("encoding_format", "Input should be 'float' or 'base64'")),
    };
    let data: Vec<Value> = inputs
        .iter()
        .enumerate()
        .map(|(index, tokens)| {
            let vector = embed(tokens);
            let embedding = if packed { json!(base64(&vector)) } else { json!(vector) };
            json!({"index": index, "object": "embedding", "embedding": embedding})
        })
        .collect();
    let tokens: usize = inputs.iter().map(Vec::len).sum();
    Ok(Json(json!({
        "id": format!("embd-{:016x}", app.next_number()), "object": "list", "created": app.unix_seconds(),
        "model": model, "data": data, "usage": usage(tokens),
    })))
}

pub(crate) async fn rerank(State(app): State<Arc<SimState>>, body: Bytes) -> Result<Json<Value>, ErrorResponse> {
    let fields = RequestFields::parse(&body)?;
    let model = model_of(&app, &fields)?;
    let query = fields.text("query")?.ok_or_else(|| wrong("query", "Field required"))?;
    let documents = texts(fields.required("documents")?, "documents")?;
    let (scores, tokens) = score_pairs(&app, &[query], &documents)?;
    let mut order: Vec<usize> = (0..documents.len()).collect();
    order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
    order.truncate(fields.count("top_n", 0)?.filter(|n| *n > 0).map_or(usize::MAX, |n| n as usize));
    let result = |at: &usize| json!({"index": at, "document": {"text": documents[*at], "multi_modal": null}, "relevance_score": scores[*at]});
    Ok(Json(json!({
        "id": format!("rerank-{:016x}", app.next_number()), "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        "results": order.iter().map(result).collect::<Vec<_>>(),
    })))
}

/// Scores one text against several others, or pairs of texts.
pub(crate) async fn score(State(app): State<Arc<SimState>>, body: Bytes) -> Result<Json<Value>, ErrorResponse> {
    let fields = RequestFields::parse(&body)?;
    let model = model_of(&app, &fields)?;
    let (left, right) =
        (fields.get("text_1").or(fields.get("queries")), fields.get("text_2").or(fields.get("documents")));
    let (Some(left), Some(right)) = (left, right) else { return Err(wrong("text_1", "Field required")) };
    let (left, right) = (texts(left, "text_1")?, texts(right, "text_2")?);
    if left.len() != 1 && left.len() != right.len() {
        return Err(wrong("text_1", "Input lengths must be either 1:1, 1:N or N:N"));
    }
    let (scores, tokens) = score_pairs(&app, &left, &right)?;
    let result = |(index, score): (usize, &f64)| json!({"index": index, "object": "score", "score": score});
    Ok(Json(json!({
        "id": format!("score-{:016x}", app.next_number()), "object": "list", "created": app.unix_seconds(),
        "model": model, "data": scores.iter().enumerate().map(result).collect::<Vec<_>>(), "usage": usage(tokens),
    })))
}

/// Returns the tokens of each text of an `input` field.
fn inputs_of(state: &SimState, input: &Value) -> Result<Vec<Vec<u32>>, ErrorResponse> {
    let unread = || wrong("input", "Input should be a string, a list of strings, or lists of token ids");
    let one = |value: &Value| match value {
        Value::String(text) => Ok(state.codec.encode(text, AddSpecialTokens::Framed)?),
        Value::Array(ids) => state.check_vocabulary(token_ids(ids, "input")?),
        _ => Err(unread()),
    };
    match input {
        Value::String(_) => Ok(vec![one(input)?]),
        Value::Array(items) if items.first().is_some_and(Value::is_number) => Ok(vec![one(input)?]),
        Value::Array(items) if !items.is_empty() && items.len() <= MAX_INPUTS => items.iter().map(one).collect(),
        _ => Err(unread()),
    }
}

fn model_of(state: &SimState, fields: &RequestFields) -> Result<String, ErrorResponse> {
    state.check_awake()?;
    let model = fields.text("model")?.unwrap_or(&state.model);
    state.adapter_of(model)?;
    Ok(model.to_owned())
}

fn texts<'a>(value: &'a Value, name: &'static str) -> Result<Vec<&'a str>, ErrorResponse> {
    let text = |value: &'a Value| value.as_str().or_else(|| value.get("text").and_then(Value::as_str));
    let texts: Option<Vec<&str>> = match value {
        Value::Array(items) => items.iter().map(text).collect(),
        one => text(one).map(|text| vec![text]),
    };
    texts.filter(|texts| !texts.is_empty()).ok_or_else(|| wrong(name, "Input should be a string or a list of strings"))
}

/// Returns the cosine of each pair's embeddings, and the number of tokens.
fn score_pairs(state: &SimState, left: &[&str], right: &[&str]) -> Result<(Vec<f64>, usize), ErrorResponse> {
    let encode = |texts: &[&str]| {
        texts.iter().map(|text| state.codec.encode(text, AddSpecialTokens::Framed)).collect::<Result<Vec<_>, _>>()
    };
    let (left, right) = (encode(left)?, encode(right)?);
    let tokens = left.iter().chain(&right).map(Vec::len).sum();
    let left: Vec<Vec<f32>> = left.iter().map(|tokens| embed(tokens)).collect();
    let cosine = |(at, tokens): (usize, &Vec<u32>)| {
        let own = &left[at.min(left.len() - 1)];
        own.iter().zip(embed(tokens)).map(|(a, b)| f64::from(a * b)).sum()
    };
    Ok((right.iter().enumerate().map(cosine).collect(), tokens))
}

/// Returns a unit vector: the sum of one direction per token, so that texts with common words are close.
fn embed(tokens: &[u32]) -> Vec<f32> {
    let mut vector = vec![0f32; EMBEDDING_WIDTH as usize];
    for token in tokens {
        let direction = xxh3_64_with_seed(&token.to_le_bytes(), 7);
        for (at, value) in vector.iter_mut().enumerate() {
            *value += if direction >> at & 1 == 1 { 1.0 } else { -1.0 };
        }
    }
    let length = vector.iter().map(|value| value * value).sum::<f32>().sqrt().max(f32::MIN_POSITIVE);
    vector.iter().map(|value| value / length).collect()
}

fn usage(tokens: usize) -> Value {
    json!({"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0, "prompt_tokens_details": null})
}

/// Encodes little-endian floats in base64, as OpenAI does.
fn base64(vector: &[f32]) -> String {
    let bytes: Vec<u8> = vector.iter().flat_map(|value| value.to_le_bytes()).collect();
    BASE64_STANDARD.encode(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_output_is_padded() {
        assert_eq!(base64(&[1.0]), "AACAPw==");
        assert_eq!(base64(&[1.0, -2.0]), "AACAPwAAAMA=");
        assert_eq!(base64(&[0.0, 0.0, 0.0]), "AAAAAAAAAAAAAAAA");
    }

    #[test]
    fn embeddings_are_unit_vectors_and_similar_texts_are_close() {
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
        let (a, near, far) = (embed(&[1, 2, 3, 4]), embed(&[1, 2, 3, 9]), embed(&[20, 21, 22, 23]));
        assert!((dot(&a, &a) - 1.0).abs() < 1e-5);
        assert!(dot(&a, &near) > dot(&a, &far));
        assert!(embed(&[]).iter().all(|value| *value == 0.0));
    }
}
