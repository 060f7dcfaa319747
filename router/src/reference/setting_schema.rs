//! Names and types of settings, asked from the `Deserialize` implementations of the configuration.
//!
//! A probe takes the place of a file. It answers with one field at a time, and when it reaches the end of its path it
//! records which type was asked for and ends with an error.

use std::cell::Cell;

use serde::de::value::Error;
use serde::de::{
    DeserializeOwned, DeserializeSeed, Deserializer, Error as _, IntoDeserializer, MapAccess, SeqAccess, Visitor,
};

/// What a setting or section accepts.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum SettingSchema {
    /// Fixed names.
    Section(Vec<(&'static str, SettingSchema)>),
    /// Any names, each with the same content.
    Map(Box<SettingSchema>),
    /// A list of equal items.
    List(Box<SettingSchema>),
    /// One of these words.
    OneOf(&'static [&'static str]),
    /// `true` or `false`.
    Switch,
    /// A whole number.
    Integer,
    /// A number.
    Number,
    /// A text.
    Text,
    /// Several types: durations and sizes are text or numbers.
    Mixed,
}

impl SettingSchema {
    /// Returns the schema of a type of the configuration.
    pub(super) fn of<T: DeserializeOwned>() -> Self {
        explore::<T>(&mut Vec::new())
    }

    /// Returns the schema below `key`, and the name under which the reference shows that key.
    pub(super) fn child<'a>(&'a self, key: &'a str) -> Option<(&'a Self, &'a str)> {
        match self {
            Self::Section(fields) => fields.iter().find(|(name, _)| *name == key).map(|(_, schema)| (schema, key)),
            Self::Map(value) => Some((value, MAP_KEY)),
            Self::List(item) => item.child(key),
            _ => None,
        }
    }
}

/// Stands for the keys of a map, which users choose.
const MAP_KEY: &str = "NAME";

#[derive(Clone, Copy, Debug)]
enum PathStep {
    Field(&'static str),
    Entry,
    Item,
}

/// Type that a deserialization asked for.
enum RequestedType {
    Section(&'static [&'static str]),
    Map,
    List,
    Value(SettingSchema),
}

fn explore<T: DeserializeOwned>(path: &mut Vec<PathStep>) -> SettingSchema {
    let requested = Cell::new(None);
    // It always ends with an error: the probe has no values.
    let _ = T::deserialize(TypeProbe { path, requested: &requested });
    let mut below = |step| {
        path.push(step);
        let schema = explore::<T>(path);
        path.pop();
        schema
    };
    match requested.take() {
        Some(RequestedType::Section(fields)) => {
            SettingSchema::Section(fields.iter().map(|name| (*name, below(PathStep::Field(name)))).collect())
        }
        Some(RequestedType::Map) => SettingSchema::Map(Box::new(below(PathStep::Entry))),
        Some(RequestedType::List) => SettingSchema::List(Box::new(below(PathStep::Item))),
        Some(RequestedType::Value(schema)) => schema,
        None => SettingSchema::Mixed,
    }
}

#[derive(Clone, Copy)]
struct TypeProbe<'p> {
    path: &'p [PathStep],
    requested: &'p Cell<Option<RequestedType>>,
}

impl TypeProbe<'_> {
    fn record<T>(self, requested: RequestedType) -> Result<T, Error> {
        self.requested.set(Some(requested));
        Err(Error::custom("the type is known"))
    }

    /// Returns the next step and the probe behind it.
    fn advance(self) -> Option<(PathStep, Self)> {
        let (step, rest) = self.path.split_first()?;
        Some((*step, Self { path: rest, ..self }))
    }
}

/// Answers a request for a plain value.
macro_rules! values {
    ($($method:ident => $schema:ident),+ $(,)?) => {$(
        fn $method<V: Visitor<'static>>(self, _: V) -> Result<V::Value, Error> {
            self.record(RequestedType::Value(SettingSchema::$schema))
        }
    )+};
}

impl Deserializer<'static> for TypeProbe<'_> {
    type Error = Error;

    values! {
        deserialize_any => Mixed, deserialize_ignored_any => Mixed, deserialize_unit => Mixed,
        deserialize_bool => Switch,
        deserialize_i8 => Integer, deserialize_i16 => Integer, deserialize_i32 => Integer, deserialize_i64 => Integer,
        deserialize_u8 => Integer, deserialize_u16 => Integer, deserialize_u32 => Integer, deserialize_u64 => Integer,
        deserialize_f32 => Number, deserialize_f64 => Number,
        deserialize_char => Text, deserialize_str => Text, deserialize_string => Text, deserialize_bytes => Text,
        deserialize_byte_buf => Text, deserialize_identifier => Text,
    }

    fn deserialize_option<V: Visitor<'static>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'static>>(self, _: &'static str, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_unit_struct<V: Visitor<'static>>(self, _: &'static str, visitor: V) -> Result<V::Value, Error> {
        self.deserialize_unit(visitor)
    }

    fn deserialize_enum<V: Visitor<'static>>(
        self,
        _: &'static str,
        variants: &'static [&'static str],
        _: V,
    ) -> Result<V::Value, Error> {
        self.record(RequestedType::Value(SettingSchema::OneOf(variants)))
    }

    fn deserialize_struct<V: Visitor<'static>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        match self.path {
            [] => self.record(RequestedType::Section(fields)),
            _ => visitor.visit_map(self),
        }
    }

    fn deserialize_map<V: Visitor<'static>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.path {
            [] => self.record(RequestedType::Map),
            _ => visitor.visit_map(self),
        }
    }

    fn deserialize_seq<V: Visitor<'static>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.path {
            [] => self.record(RequestedType::List),
            _ => visitor.visit_seq(self),
        }
    }

    fn deserialize_tuple<V: Visitor<'static>>(self, _: usize, visitor: V) -> Result<V::Value, Error> {
        self.deserialize_seq(visitor)
    }

    fn deserialize_tuple_struct<V: Visitor<'static>>(
        self,
        _: &'static str,
        _: usize,
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.deserialize_seq(visitor)
    }
}

impl MapAccess<'static> for TypeProbe<'_> {
    type Error = Error;

    fn next_key_seed<K: DeserializeSeed<'static>>(&mut self, seed: K) -> Result<Option<K::Value>, Error> {
        let key = match self.path.first() {
            Some(PathStep::Field(name)) => name,
            _ => MAP_KEY,
        };
        seed.deserialize(key.into_deserializer()).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'static>>(&mut self, seed: V) -> Result<V::Value, Error> {
        let (_, rest) = self.advance().ok_or_else(|| Error::custom("a value stands behind its key"))?;
        seed.deserialize(rest)
    }
}

impl SeqAccess<'static> for TypeProbe<'_> {
    type Error = Error;

    fn next_element_seed<T: DeserializeSeed<'static>>(&mut self, seed: T) -> Result<Option<T::Value>, Error> {
        match self.advance() {
            Some((PathStep::Item, rest)) => seed.deserialize(rest).map(Some),
            _ => Ok(None),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Deserialize)]
    #[serde(rename_all = "kebab-case")]
    enum SampleEnum {
        One,
        NumberTwo,
    }

    #[derive(Deserialize)]
    #[expect(dead_code, reason = "only its schema is read")]
    struct SampleItem {
        word: SampleEnum,
        share: Option<f64>,
    }

    #[derive(Deserialize, Default)]
    #[serde(default)]
    struct SettingsFixture {
        enabled: bool,
        count: Option<u32>,
        names: Vec<String>,
        items: std::collections::BTreeMap<String, SampleItem>,
        span: Option<vocabulary::TimeSpan>,
    }

    #[test]
    fn schema_lists_every_field_with_its_type() {
        let item = SettingSchema::Section(vec![
            ("word", SettingSchema::OneOf(&["one", "number-two"])),
            ("share", SettingSchema::Number),
        ]);
        let expected = SettingSchema::Section(vec![
            ("enabled", SettingSchema::Switch),
            ("count", SettingSchema::Integer),
            ("names", SettingSchema::List(Box::new(SettingSchema::Text))),
            ("items", SettingSchema::Map(Box::new(item))),
            ("span", SettingSchema::Mixed),
        ]);
        assert_eq!(SettingSchema::of::<SettingsFixture>(), expected);
        let (items, _) = expected.child("items").unwrap();
        assert_eq!(items.child("anything").map(|(_, shown)| shown), Some(MAP_KEY));
    }
}
