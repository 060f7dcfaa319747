//! A request body as a JSON object whose fields are type-checked when read, as vLLM's validation does.

use axum::body::Bytes;
use serde_json::{Map, Value};

use super::errors::ErrorResponse;

/// A JSON object from a client.
pub(crate) struct RequestFields {
    fields: Map<String, Value>,
    body: Bytes,
}

impl RequestFields {
    pub(crate) fn parse(body: &Bytes) -> Result<Self, ErrorResponse> {
        let mut body = body.clone();
        let parsed = serde_json::from_slice(&body).or_else(|error| match mend_surrogates(&body) {
            Some(mended) => {
                body = mended.into();
                serde_json::from_slice(&body)
            }
            None => Err(error),
        });
        match parsed {
            Ok(Value::Object(fields)) => Ok(Self { fields, body }),
            Ok(_) => Err(ErrorResponse::bad_request("Input should be a valid dictionary", None)),
            Err(error) => Err(ErrorResponse::bad_request(format!("JSON decode error: {error}"), None)),
        }
    }

    /// Returns the whole body as it was sent, except that lone surrogates are replaced.
    pub(crate) fn body(&self) -> &Bytes {
        &self.body
    }

    pub(crate) fn get(&self, name: &'static str) -> Option<&Value> {
        self.fields.get(name).filter(|value| !value.is_null())
    }

    pub(crate) fn required(&self, name: &'static str) -> Result<&Value, ErrorResponse> {
        self.get(name).ok_or_else(|| wrong(name, "Field required"))
    }

    pub(crate) fn text(&self, name: &'static str) -> Result<Option<&str>, ErrorResponse> {
        self.typed(name, "Input should be a valid string", Value::as_str)
    }

    pub(crate) fn flag(&self, name: &'static str) -> Result<bool, ErrorResponse> {
        Ok(self.typed(name, "Input should be a valid boolean", Value::as_bool)?.unwrap_or(false))
    }

    pub(crate) fn number(&self, name: &'static str) -> Result<Option<f64>, ErrorResponse> {
        self.typed(name, "Input should be a valid number", Value::as_f64)
    }

    pub(crate) fn whole(&self, name: &'static str) -> Result<Option<i64>, ErrorResponse> {
        self.typed(name, "Input should be a valid integer", Value::as_i64)
    }

    pub(crate) fn list(&self, name: &'static str) -> Result<Option<&[Value]>, ErrorResponse> {
        self.typed(name, "Input should be a valid list", |value| value.as_array().map(Vec::as_slice))
    }

    pub(crate) fn object(&self, name: &'static str) -> Result<Option<&Map<String, Value>>, ErrorResponse> {
        self.typed(name, "Input should be a valid dictionary", Value::as_object)
    }

    /// Returns a number of tokens, which must be at least `least`.
    pub(crate) fn count(&self, name: &'static str, least: u32) -> Result<Option<u32>, ErrorResponse> {
        let Some(count) = self.whole(name)? else { return Ok(None) };
        match u32::try_from(count) {
            Ok(count) if count >= least => Ok(Some(count)),
            _ => {
                let message =
                    format!("{name} must be at least {least}, got {count}. (parameter={name}, value={count})");
                Err(ErrorResponse::bad_request(message, Some(name)))
            }
        }
    }

    fn typed<'a, T>(
        &'a self,
        name: &'static str,
        expected: &'static str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ErrorResponse> {
        self.get(name).map(|value| read(value).ok_or_else(|| wrong(name, expected))).transpose()
    }
}

pub(crate) fn wrong(name: &'static str, expected: &str) -> ErrorResponse {
    ErrorResponse::bad_request(format!("1 validation error: [('body', '{name}')] {expected}"), Some(name))
}

/// Parses token ids from a JSON list.
pub(crate) fn token_ids(values: &[Value], name: &'static str) -> Result<Vec<u32>, ErrorResponse> {
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    values
        .iter()
        .map(|value| id(value).ok_or_else(|| wrong(name, "Input should be a valid list of token ids")))
        .collect()
}

/// Replaces lone surrogates, which Python accepts and serde does not. None if there are none.
fn mend_surrogates(body: &[u8]) -> Option<Vec<u8>> {
    let mut mended = body.to_vec();
    let (mut at, mut changed) = (0, false);
    while at < mended.len() {
        if mended[at] != b'\\' {
            at += 1;
            continue;
        }
        let step = match (surrogate(&mended, at), surrogate(&mended, at + 6)) {
            (Some(SurrogateHalf::High), Some(SurrogateHalf::Low)) => 12,
            (Some(_), _) => {
                mended[at + 2..at + 6].copy_from_slice(b"fffd");
                changed = true;
                6
            }
            (None, _) => 2,
        };
        at += step;
    }
    changed.then_some(mended)
}

enum SurrogateHalf {
    High,
    Low,
}

fn surrogate(text: &[u8], at: usize) -> Option<SurrogateHalf> {
    let digits = text.get(at..at + 6)?.strip_prefix(b"\\u")?;
    match u16::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()? {
        0xd800..=0xdbff => Some(SurrogateHalf::High),
        0xdc00..=0xdfff => Some(SurrogateHalf::Low),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text_of(body: &str) -> String {
        let fields = RequestFields::parse(&Bytes::copy_from_slice(body.as_bytes())).unwrap();
        fields.text("a").unwrap().unwrap().to_owned()
    }

    #[test]
    fn lone_surrogates_are_replaced_and_pairs_kept() {
        assert_eq!(text_of(r#"{"a":"x\ud83dy\\ud83d\ud83d\ude00\ude00"}"#), "x\u{fffd}y\\ud83d\u{1f600}\u{fffd}");
    }

    #[test]
    fn wrong_types_and_broken_bodies_are_client_errors() {
        let fields = RequestFields::parse(&Bytes::from_static(br#"{"n":"1","m":-2,"s":5,"z":null}"#)).unwrap();
        assert!(fields.whole("n").is_err() && fields.text("s").is_err() && fields.count("m", 0).is_err());
        assert_eq!((fields.whole("z"), fields.get("z")), (Ok(None), None));
        for body in ["", "{", "[]", "\"x\"", "{\"a\":\"\\ud800}"] {
            assert!(RequestFields::parse(&Bytes::copy_from_slice(body.as_bytes())).is_err(), "{body}");
        }
    }
}
