//! Ids as fixed-width lower-case hex, in text and in human-readable serde formats.

/// Implements `Display`, `Debug`, `FromStr` and serde for a newtype over an unsigned integer, as fixed-width hex.
/// Binary formats carry the plain integer.
macro_rules! hex_id {
    ($name:ident, $int:ty, $prefix:literal) => {
        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, concat!($prefix, "{:0width$x}"), self.0, width = size_of::<$int>() * 2)
            }
        }

        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                std::fmt::Display::fmt(self, f)
            }
        }

        impl std::str::FromStr for $name {
            type Err = $crate::ids::ParseIdError;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                let wanted = size_of::<$int>() * 2;
                let error = || $crate::ids::ParseIdError {
                    expected: $prefix,
                    digits: wanted,
                    text: text.chars().take(64).collect(),
                };
                let digits = text.strip_prefix($prefix).ok_or_else(error)?;
                // An id with missing digits would be a different id.
                if digits.len() != wanted || !digits.bytes().all(|b| b.is_ascii_hexdigit()) {
                    return Err(error());
                }
                <$int>::from_str_radix(digits, 16).map(Self).map_err(|_| error())
            }
        }

        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                if serializer.is_human_readable() {
                    serializer.collect_str(self)
                } else {
                    serde::Serialize::serialize(&self.0.to_be_bytes(), serializer)
                }
            }
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                if deserializer.is_human_readable() {
                    let text = <std::borrow::Cow<'de, str>>::deserialize(deserializer)?;
                    text.parse().map_err(serde::de::Error::custom)
                } else {
                    let bytes = <[u8; size_of::<$int>()]>::deserialize(deserializer)?;
                    Ok(Self(<$int>::from_be_bytes(bytes)))
                }
            }
        }
    };
}

pub(crate) use hex_id;
