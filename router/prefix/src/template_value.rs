//! Parses JSON text into template values, keeps key order, and rejects what Python would read or print differently.
//!
//! `serde_json::Value` is not used as an intermediate: it would lose key order and copy every string twice.

use std::fmt;
use std::sync::Arc;

use crate::python::ExponentFloat;
use minijinja::Value;
use minijinja::value::{Enumerator, Object, ObjectExt, ValueKind};
use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};

/// Error text that identifies this module's errors inside serde's, whose error type carries text only.
pub(crate) const UNSUPPORTED_NUMBER: &str = "a number that Python reads differently";

/// Template value parsed from JSON.
#[derive(Clone, Debug)]
pub(crate) struct TemplateValue(pub Value);

impl<'de> Deserialize<'de> for TemplateValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ValueVisitor).map(TemplateValue)
    }
}

struct ValueVisitor;

impl<'de> Visitor<'de> for ValueVisitor {
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

    /// Integers beyond 64 bits and `-0` arrive here, too; Python keeps both as integers.
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
        while let Some(TemplateValue(value)) = items.next_element()? {
            values.push(value);
        }
        Ok(Value::from(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut pairs: Vec<(Value, Value)> = Vec::new();
        while let Some((TemplateValue(key), TemplateValue(value))) = entries.next_entry()? {
            pairs.push((key, value));
        }
        Ok(object(pairs))
    }
}

/// Maximum number of entries that are searched linearly; the template engine does the same with its maps.
const MAX_LINEAR_ENTRIES: usize = 12;

/// Small object: its entries in order, with distinct keys. Built without hashing and read in place.
#[derive(Debug)]
pub(crate) struct SmallObject(Vec<(Value, Value)>);

impl SmallObject {
    pub(crate) fn entries(&self) -> &[(Value, Value)] {
        &self.0
    }
}

impl Object for SmallObject {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.get_value_by_str(key.as_str()?)
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        self.0.iter().find(|(name, _)| name.as_str() == Some(key)).map(|(_, value)| value.clone())
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        self.mapped_rev_key_value_enumerator(|fields| Box::new(fields.0.iter().cloned()))
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        Some(self.0.len())
    }
}

/// Builds an object from entries; a repeated key keeps its first position and its last value.
pub(crate) fn object(pairs: Vec<(Value, Value)>) -> Value {
    let is_new = |at: usize| {
        let name = pairs[at].0.as_str();
        name.is_some() && pairs[..at].iter().all(|(before, _)| before.as_str() != name)
    };
    match pairs.len() <= MAX_LINEAR_ENTRIES && (0..pairs.len()).all(is_new) {
        true => Value::from_object(SmallObject(pairs)),
        false => Value::from_pairs(pairs),
    }
}

/// Returns whether the value is an object with entries.
pub(crate) fn has_entries(value: &Value) -> bool {
    value.kind() == ValueKind::Map && value.len() != Some(0)
}

/// Returns an object's entries; none for any other value.
pub(crate) fn entries(value: &Value) -> impl Iterator<Item = (Value, Value)> + use<> {
    let object = value.as_object().filter(|_| value.kind() == ValueKind::Map).cloned();
    object.and_then(|object| object.try_iter_pairs()).into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(json: &str) -> Result<Value, serde_json::Error> {
        serde_json::from_str::<TemplateValue>(json).map(|json| json.0)
    }

    #[test]
    fn repeated_key_keeps_its_first_position_and_last_value() {
        let object = value(r#"{"z":1,"a":2,"m":3,"z":4}"#).unwrap();
        let seen: Vec<String> = entries(&object).map(|(key, value)| format!("{key}={value}")).collect();
        assert_eq!(seen, ["z=4", "a=2", "m=3"]);
    }

    #[test]
    fn small_objects_behave_like_native_template_maps() {
        for names in [vec![], vec!["b", "a"], vec!["b", "a", "b"], vec!["x"; 3], (0..40).map(|_| "n").collect()] {
            check(names.iter().map(|name| name.to_string()).collect());
        }
        for count in [1, 2, MAX_LINEAR_ENTRIES, MAX_LINEAR_ENTRIES + 1, 30] {
            check((0..count).map(|n| format!("name {}", n * 7 % count)).collect());
        }
    }

    fn check(names: Vec<String>) {
        let pairs = || names.iter().zip(0..).map(|(name, n)| (Value::from(name.as_str()), Value::from(n)));
        let (ours, engines) = (object(pairs().collect()), Value::from_pairs(pairs()));
        let is_small = ours.downcast_object_ref::<SmallObject>().is_some();
        assert_eq!(is_small, names.len() <= MAX_LINEAR_ENTRIES && engines.len() == Some(names.len()), "{names:?}");
        assert_eq!((&ours, &engines), (&engines, &ours), "either way");
        assert_eq!((ours.kind(), ours.is_true(), ours.len()), (engines.kind(), engines.is_true(), engines.len()));
        assert_eq!(has_entries(&ours), engines.len() != Some(0));
        let environment = minijinja::Environment::new();
        let shown = |object: &Value| {
            let template = "{{ o }} {{ o|items|list }} {{ o|list }} {{ o|reverse|list }} {{ o.b }} {{ o['name 1'] }} {{ 'a' in o }} {{ 1 in o }} {{ o[1] }} {{ o|dictsort }}";
            environment.render_str(template, minijinja::context! { o => object }).unwrap()
        };
        assert_eq!(shown(&ours), shown(&engines));
    }

    #[test]
    fn integers_up_to_64_bits_are_exact() {
        for text in ["0", "-1", "9223372036854775807", "-9223372036854775808", "18446744073709551615"] {
            assert_eq!(value(text).unwrap().to_string(), text);
        }
    }

    #[test]
    fn numbers_beyond_64_bits_are_rejected() {
        for text in ["18446744073709551616", "-9223372036854775809", "-0", "1e30"] {
            assert!(value(text).unwrap_err().to_string().contains(UNSUPPORTED_NUMBER), "{text}");
        }
        assert_eq!(value("-0.5").unwrap(), Value::from(-0.5));
    }

    #[test]
    fn deep_nesting_returns_an_error_instead_of_overflowing_the_stack() {
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
