//! JSON text to template values, keeping key order and refusing what Python would read or print differently.
//!
//! No detour over `serde_json::Value`: key order would be lost, and every string copied twice.

use std::fmt;

use crate::python::ExponentFloat;
use minijinja::Value;
use minijinja::value::ValueKind;
use serde::de::{Deserialize, DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};

/// Marks the errors of this module inside serde's, whose type carries text only.
pub(crate) const UNSUPPORTED_NUMBER: &str = "a number that Python reads differently";

/// A template value read from JSON.
#[derive(Clone, Debug)]
pub(crate) struct JsonValue(pub Value);

impl<'de> Deserialize<'de> for JsonValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        ValueSeed.deserialize(deserializer).map(JsonValue)
    }
}

struct ValueSeed;

impl<'de> DeserializeSeed<'de> for ValueSeed {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for ValueSeed {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        Ok(Value::from(()))
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    /// Integers beyond 64 bits and `-0` arrive here too, and Python keeps both as integers.
    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        let may_be_an_integer =
            value.fract() == 0.0 && (value.abs() >= 9.2e18 || value == 0.0 && value.is_sign_negative());
        match may_be_an_integer {
            true => Err(E::custom(UNSUPPORTED_NUMBER)),
            false if ExponentFloat::is_one(value) => Ok(Value::from_object(ExponentFloat(value))),
            false => Ok(Value::from(value)),
        }
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(value) = items.next_element_seed(ValueSeed)? {
            values.push(value);
        }
        Ok(Value::from(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut pairs: Vec<(Value, Value)> = Vec::new();
        while let Some(key) = entries.next_key_seed(ValueSeed)? {
            pairs.push((key, entries.next_value_seed(ValueSeed)?));
        }
        Ok(Value::from_pairs(pairs))
    }
}

/// The entries of an object; nothing for any other value.
pub(crate) fn entries(value: &Value) -> impl Iterator<Item = (Value, Value)> + use<> {
    let object = value.as_object().filter(|_| value.kind() == ValueKind::Map).cloned();
    object.and_then(|object| object.try_iter_pairs()).into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(json: &str) -> Result<Value, serde_json::Error> {
        serde_json::from_str::<JsonValue>(json).map(|json| json.0)
    }

    #[test]
    fn keys_keep_the_order_of_the_text_and_a_repeated_key_its_first_place_and_last_value() {
        let object = value(r#"{"z":1,"a":2,"m":3,"z":4}"#).unwrap();
        let seen: Vec<String> = entries(&object).map(|(key, value)| format!("{key}={value}")).collect();
        assert_eq!(seen, ["z=4", "a=2", "m=3"]);
    }

    #[test]
    fn integers_up_to_64_bits_are_exact() {
        for text in ["0", "-1", "9223372036854775807", "-9223372036854775808", "18446744073709551615"] {
            assert_eq!(value(text).unwrap().to_string(), text);
        }
    }

    #[test]
    fn numbers_that_python_would_keep_as_integers_are_refused() {
        for text in ["18446744073709551616", "-9223372036854775809", "-0", "1e30"] {
            assert!(value(text).unwrap_err().to_string().contains(UNSUPPORTED_NUMBER), "{text}");
        }
        assert_eq!(value("-0.5").unwrap(), Value::from(-0.5));
    }

    #[test]
    fn deep_nesting_is_an_error_and_not_a_stack_overflow() {
        assert!(value(&"[".repeat(100_000)).is_err());
        assert!(value(&format!("{}1{}", "[".repeat(100), "]".repeat(100))).is_ok());
    }

    #[test]
    fn only_objects_have_entries() {
        for text in ["null", "[1]", "\"x\"", "1"] {
            assert_eq!(entries(&value(text).unwrap()).count(), 0, "{text}");
        }
    }
}
