//! Edits of a JSON object's top level that leave every other byte as it was.
//!
//! One pass finds where the fields lie; nothing inside them is parsed, so the cost does not depend on what they hold.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

use serde::Deserializer as _;
use serde::de::{MapAccess, Visitor};
use serde_json::value::RawValue;

/// Most fields of one object; real requests have a few dozen.
pub const MOST_FIELDS: usize = 1024;

/// Why a text is not an object that can be edited.
#[derive(Debug, thiserror::Error)]
pub enum SpliceError {
    /// It is not one JSON object.
    #[error("not a JSON object: {0}")]
    NotAnObject(#[from] serde_json::Error),
    /// A field stands twice, and engines differ in which one they take.
    #[error("the field {0:?} stands twice")]
    Twice(String),
}

/// One field and where it lies in the text.
#[derive(Clone, Debug)]
struct Field<'a> {
    name: Cow<'a, str>,
    /// From the name's first quote to the value's last byte.
    whole: Range<usize>,
    value: &'a str,
}

/// The fields of one JSON object.
#[derive(Clone, Debug)]
pub struct Object<'a> {
    text: &'a str,
    fields: Vec<Field<'a>>,
}

/// A change to one field.
#[derive(Clone, Debug)]
pub enum Edit<'e> {
    /// Takes it out, where it is there.
    Remove(&'e str),
    /// Gives it this value, which must be JSON.
    Set(&'e str, Cow<'e, str>),
}

impl<'a> Object<'a> {
    /// Finds the fields of `text`.
    pub fn scan(text: &'a str) -> Result<Self, SpliceError> {
        let mut json = serde_json::Deserializer::from_str(text);
        let values = json.deserialize_map(Fields)?;
        json.end()?;
        let mut fields: Vec<Field<'a>> = Vec::with_capacity(values.len());
        let mut at = text.find('{').unwrap_or(0) + 1;
        for (name, value) in values {
            if fields.iter().any(|field| field.name == name) {
                return Err(SpliceError::Twice(name.chars().take(64).collect()));
            }
            let value = value.get();
            // Between two fields there is only white space and a comma, so the next quote begins the name.
            let start = at + text[at..].find('"').unwrap_or(0);
            let end = value.as_ptr() as usize - text.as_ptr() as usize + value.len();
            fields.push(Field { name, whole: start..end, value });
            at = end;
        }
        Ok(Self { text, fields })
    }

    /// The JSON text of a field's value.
    pub fn get(&self, name: &str) -> Option<&'a str> {
        self.fields.iter().find(|field| field.name == name).map(|field| field.value)
    }

    /// The object's text after the edits. Each name may stand in one edit only.
    pub fn edited(&self, edits: &[Edit<'_>]) -> String {
        let added: usize = edits.iter().map(Edit::room).sum();
        let mut out = String::with_capacity(self.text.len() + added);
        let start = self.fields.first().map_or_else(|| self.text.find('{').map_or(0, |at| at + 1), |f| f.whole.start);
        out.push_str(&self.text[..start]);
        let (mut any, mut before) = (false, start);
        for field in &self.fields {
            let gap = before..field.whole.start;
            before = field.whole.end;
            let edit = edits.iter().find(|edit| edit.name() == field.name);
            if let Some(Edit::Remove(_)) = edit {
                continue;
            }
            if any {
                out.push_str(if gap.is_empty() { "," } else { &self.text[gap] });
            }
            any = true;
            match edit {
                Some(Edit::Set(_, value)) => {
                    out.push_str(&self.text[field.whole.start..field.whole.end - field.value.len()]);
                    out.push_str(value);
                }
                _ => out.push_str(&self.text[field.whole.clone()]),
            }
        }
        for edit in edits {
            if let Edit::Set(name, value) = edit
                && self.get(name).is_none()
            {
                out.push_str(if any { ",\"" } else { "\"" });
                any = true;
                out.push_str(name);
                out.push_str("\":");
                out.push_str(value);
            }
        }
        out.push_str(&self.text[before..]);
        out
    }
}

impl Edit<'_> {
    fn name(&self) -> &str {
        match self {
            Edit::Remove(name) | Edit::Set(name, _) => name,
        }
    }

    fn room(&self) -> usize {
        match self {
            Edit::Remove(_) => 0,
            Edit::Set(name, value) => name.len() + value.len() + 4,
        }
    }
}

struct Fields;

impl<'de> Visitor<'de> for Fields {
    type Value = Vec<(Cow<'de, str>, &'de RawValue)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("one JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut fields = Vec::with_capacity(16);
        while let Some(Name(name)) = map.next_key()? {
            if fields.len() == MOST_FIELDS {
                return Err(serde::de::Error::custom(format_args!("more than {MOST_FIELDS} fields")));
            }
            fields.push((name, map.next_value()?));
        }
        Ok(fields)
    }
}

/// A field's name; borrowed unless it holds escapes.
#[derive(serde::Deserialize)]
struct Name<'a>(#[serde(borrow)] Cow<'a, str>);

#[cfg(test)]
mod tests {
    use super::*;

    fn edited(text: &str, edits: &[Edit<'_>]) -> String {
        let out = Object::scan(text).unwrap().edited(edits);
        assert!(Object::scan(&out).is_ok(), "{out}");
        out
    }

    fn set<'e>(name: &'e str, value: &'e str) -> Edit<'e> {
        Edit::Set(name, value.into())
    }

    #[test]
    fn without_edits_every_byte_stays() {
        for text in ["{}", " { } ", r#"{"a" : [1, {"b":2}] ,"c":"\ud800"}"#, "{\"a\":1}\n"] {
            assert_eq!(edited(text, &[]), text);
        }
    }

    #[test]
    fn a_field_is_taken_out_with_one_comma() {
        let text = r#"{ "a":1, "b" : {"a":2} ,"c":3 }"#;
        assert_eq!(edited(text, &[Edit::Remove("a")]), r#"{ "b" : {"a":2} ,"c":3 }"#);
        assert_eq!(edited(text, &[Edit::Remove("b")]), r#"{ "a":1 ,"c":3 }"#);
        assert_eq!(edited(text, &[Edit::Remove("c")]), r#"{ "a":1, "b" : {"a":2} }"#);
        let all = [Edit::Remove("a"), Edit::Remove("b"), Edit::Remove("c"), Edit::Remove("d")];
        assert_eq!(edited(text, &all), "{  }");
        assert_eq!(edited(text, &all[..2]), r#"{ "c":3 }"#);
    }

    #[test]
    fn a_field_is_replaced_in_place_or_added_at_the_end() {
        assert_eq!(edited(r#"{"a": 1 , "b":2}"#, &[set("a", "[9]")]), r#"{"a": [9] , "b":2}"#);
        assert_eq!(edited(r#"{"b":2 }"#, &[set("a", "9")]), r#"{"b":2,"a":9 }"#);
        assert_eq!(edited("{ }", &[set("a", "9"), set("b", "8")]), r#"{"a":9,"b":8 }"#);
        assert_eq!(edited(r#"{"b":2}"#, &[Edit::Remove("b"), set("a", "9")]), r#"{"a":9}"#);
    }

    #[test]
    fn a_name_written_with_escapes_is_the_same_name() {
        assert_eq!(edited(r#"{"\u0061":1,"b":2}"#, &[Edit::Remove("a")]), r#"{"b":2}"#);
    }

    #[test]
    fn what_cannot_be_edited_safely_is_refused() {
        for text in ["", "[]", "{", r#"{"a":1}}"#, r#"{"a":}"#, "{'a':1}", r#"{"a":1,}"#] {
            assert!(matches!(Object::scan(text), Err(SpliceError::NotAnObject(_))), "{text}");
        }
        assert!(matches!(Object::scan(r#"{"a":1,"\u0061":2}"#), Err(SpliceError::Twice(name)) if name == "a"));
        let many: Vec<String> = (0..=MOST_FIELDS).map(|n| format!("\"{n}\":0")).collect();
        assert!(Object::scan(&format!("{{{}}}", many.join(","))).is_err());
    }
}
