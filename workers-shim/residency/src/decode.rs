//! Decodes a KV-event message to a [`KvEventBatch`]: the maps of vLLM and SGLang, and the older positional arrays.
//!
//! Unknown fields and events are skipped; a field of the wrong type rejects the whole batch, so that nothing is applied
//! partially.

use smart_default::SmartDefault;
use vocabulary::DpRank;

use crate::kv_event::{
    BlockRemoved, BlockStored, EngineHash, ExtraKey, KvCacheEvent, KvCacheSpecKind, KvEventBatch, tier_of,
};
use crate::msgpack::{MsgpackCursor, MsgpackItem};

/// Why a message could not be decoded.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DecodeError {
    /// It ends too early, or contains lengths beyond its end.
    #[error("the message ends before what it announces")]
    Truncated,
    /// A byte that starts no valid value.
    #[error("a byte that begins no msgpack value")]
    Malformed,
    /// There are bytes after the batch.
    #[error("bytes after the end of the batch")]
    Trailing,
    /// Values are nested too deep.
    #[error("values nested too deep")]
    TooDeep,
    /// A limit was exceeded; contains what there was too much of.
    #[error("too many {0}")]
    TooMany(&'static str),
    /// A field has the wrong type; contains its name.
    #[error("unexpected type of {0}")]
    Type(&'static str),
}

/// Limits for one message.
#[derive(Clone, Copy, PartialEq, Eq, Debug, SmartDefault)]
pub struct DecodeLimits {
    /// Size of the message in bytes.
    #[default(64 << 20)]
    pub bytes: usize,
    /// Number of events.
    #[default(100_000)]
    pub events: u32,
    /// Blocks per event.
    #[default(1 << 18)]
    pub blocks: u32,
    /// Bytes of a salt or an adapter name.
    #[default(4096)]
    pub text: usize,
}

/// Decodes one message: `[timestamp, [event, ...], rank?]`.
pub fn decode(bytes: &[u8], limits: &DecodeLimits) -> Result<KvEventBatch, DecodeError> {
    if bytes.len() > limits.bytes {
        return Err(DecodeError::TooMany("bytes"));
    }
    let mut reader = EventReader { cursor: MsgpackCursor::new(bytes), limits };
    let MsgpackItem::Array(fields @ 2..) = reader.cursor.item()? else { return Err(DecodeError::Type("batch")) };
    let timestamp = match reader.cursor.item()? {
        MsgpackItem::Float(seconds) => seconds,
        MsgpackItem::Unsigned(seconds) => seconds as f64,
        _ => return Err(DecodeError::Type("timestamp")),
    };
    let MsgpackItem::Array(count) = reader.cursor.item()? else { return Err(DecodeError::Type("events")) };
    if count > limits.events {
        return Err(DecodeError::TooMany("events"));
    }
    let events = (0..count).map(|_| reader.event()).collect::<Result<_, _>>()?;
    let rank = if fields > 2 { reader.number("rank")? } else { None };
    for _ in 3..fields {
        reader.cursor.skip()?;
    }
    if reader.cursor.remaining() > 0 {
        return Err(DecodeError::Trailing);
    }
    let rank = rank.map(|rank| u16::try_from(rank).map(DpRank).map_err(|_| DecodeError::TooMany("ranks")));
    Ok(KvEventBatch { timestamp, events, rank: rank.transpose()? })
}

/// The fields of all kinds of events, not yet interpreted.
#[derive(Default)]
struct EventFields {
    hashes: Vec<EngineHash>,
    parent: Option<EngineHash>,
    tokens: Vec<u32>,
    block_size: u64,
    lora_id: Option<u64>,
    medium: Option<Box<str>>,
    lora_name: Option<Box<str>>,
    salt: Option<Box<str>>,
    extra: Vec<Vec<ExtraKey>>,
    group: u64,
    kind: Option<Box<str>>,
    remaining: Vec<u32>,
}

/// Field order in the positional encoding.
const STORED: [&str; 10] = [
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
];
const REMOVED: [&str; 3] = ["block_hashes", "medium", "group_idx"];

struct EventReader<'a, 'l> {
    cursor: MsgpackCursor<'a>,
    limits: &'l DecodeLimits,
}

impl<'a> EventReader<'a, '_> {
    fn event(&mut self) -> Result<KvCacheEvent, DecodeError> {
        match self.cursor.item()? {
            MsgpackItem::Array(count @ 1..) => self.positional(count),
            MsgpackItem::Map(count) => self.tagged(count),
            _ => Err(DecodeError::Type("event")),
        }
    }

    fn positional(&mut self, count: u32) -> Result<KvCacheEvent, DecodeError> {
        let MsgpackItem::Text(tag) = self.cursor.item()? else { return Err(DecodeError::Type("event tag")) };
        let names: &[&str] = match tag {
            b"BlockStored" => &STORED,
            b"BlockRemoved" => &REMOVED,
            _ => &[],
        };
        let mut fields = EventFields::default();
        for position in 0..count as usize - 1 {
            match names.get(position) {
                Some(name) => self.field(name.as_bytes(), &mut fields)?,
                None => self.cursor.skip()?,
            }
        }
        build_event(tag, fields)
    }

    fn tagged(&mut self, count: u32) -> Result<KvCacheEvent, DecodeError> {
        let mut fields = EventFields::default();
        let mut tag: &[u8] = b"";
        for _ in 0..count {
            let MsgpackItem::Text(name) = self.cursor.item()? else { return Err(DecodeError::Type("field name")) };
            if name == b"type" {
                let MsgpackItem::Text(text) = self.cursor.item()? else { return Err(DecodeError::Type("event tag")) };
                tag = text;
            } else {
                self.field(name, &mut fields)?;
            }
        }
        build_event(tag, fields)
    }

    fn field(&mut self, name: &[u8], fields: &mut EventFields) -> Result<(), DecodeError> {
        match name {
            b"block_hashes" => fields.hashes = self.hashes()?,
            b"parent_block_hash" => {
                fields.parent = match self.cursor.item()? {
                    MsgpackItem::Nil => None,
                    item => Some(hash(item).ok_or(DecodeError::Type("parent_block_hash"))?),
                }
            }
            b"token_ids" => fields.tokens = self.tokens()?,
            b"block_size" => fields.block_size = self.number("block_size")?.unwrap_or(0),
            b"lora_id" => fields.lora_id = self.number("lora_id")?,
            b"medium" => fields.medium = self.text("medium")?,
            b"lora_name" => fields.lora_name = self.text("lora_name")?,
            b"cache_salt" => fields.salt = self.text("cache_salt")?,
            b"extra_keys" => fields.extra = self.extra_keys()?,
            b"group_idx" => fields.group = self.number("group_idx")?.unwrap_or(0),
            b"kv_cache_spec_kind" => fields.kind = self.text("kv_cache_spec_kind")?,
            b"remaining_copy_counts" => {
                fields.remaining = self.list("remaining_copy_counts", |item| match item {
                    MsgpackItem::Unsigned(count) => u32::try_from(count).ok(),
                    _ => None,
                })?;
            }
            _ => self.cursor.skip()?,
        }
        Ok(())
    }

    /// Decodes an array, with nil as an empty one, with at most the maximum number of blocks per event.
    fn list<T>(&mut self, what: &'static str, read: fn(MsgpackItem<'a>) -> Option<T>) -> Result<Vec<T>, DecodeError> {
        let count = self.count(what, u64::from(self.limits.blocks))?;
        // The rest of the message has room for this many.
        let mut list = Vec::with_capacity(count as usize);
        for _ in 0..count {
            list.push(read(self.cursor.item()?).ok_or(DecodeError::Type(what))?);
        }
        Ok(list)
    }

    fn count(&mut self, what: &'static str, most: u64) -> Result<u32, DecodeError> {
        match self.cursor.item()? {
            MsgpackItem::Nil => Ok(0),
            MsgpackItem::Array(count) if u64::from(count) <= most => Ok(count),
            MsgpackItem::Array(_) => Err(DecodeError::TooMany(what)),
            _ => Err(DecodeError::Type(what)),
        }
    }

    fn hashes(&mut self) -> Result<Vec<EngineHash>, DecodeError> {
        let what = "block_hashes";
        let count = self.count(what, u64::from(self.limits.blocks))?;
        // The rest of the message has room for this many.
        let mut hashes = Vec::with_capacity(count as usize);
        for _ in 0..count {
            hashes.push(match self.cursor.wide_number() {
                Some(number) => EngineHash(number),
                None => hash(self.cursor.item()?).ok_or(DecodeError::Type(what))?,
            });
        }
        Ok(hashes)
    }

    fn tokens(&mut self) -> Result<Vec<u32>, DecodeError> {
        let count = self.count("token_ids", u64::MAX)?;
        // The rest of the message has room for this many.
        let mut tokens = vec![0; count as usize];
        let mut read = 0;
        loop {
            read += self.cursor.tokens(&mut tokens[read..]);
            if read == tokens.len() {
                return Ok(tokens);
            }
            tokens[read] = self.unusual_token()?;
            read += 1;
        }
    }

    /// Decodes a token with a longer encoding than necessary; an error if it is not a token.
    #[cold]
    fn unusual_token(&mut self) -> Result<u32, DecodeError> {
        match self.cursor.item()? {
            MsgpackItem::Unsigned(token) => u32::try_from(token).map_err(|_| DecodeError::Type("token_ids")),
            _ => Err(DecodeError::Type("token_ids")),
        }
    }

    fn extra_keys(&mut self) -> Result<Vec<Vec<ExtraKey>>, DecodeError> {
        let blocks = self.count("extra_keys", u64::from(self.limits.blocks))?;
        (0..blocks)
            .map(|_| {
                let keys = self.count("extra_keys", self.limits.text as u64)?;
                (0..keys).map(|_| self.extra_key()).collect()
            })
            .collect()
    }

    fn extra_key(&mut self) -> Result<ExtraKey, DecodeError> {
        let raw = self.cursor.raw()?;
        if raw.len() > self.limits.text + 8 {
            return Err(DecodeError::TooMany("bytes of an extra key"));
        }
        Ok(match MsgpackCursor::new(raw).item()? {
            MsgpackItem::Text(text) => ExtraKey::Text(utf8(text, "extra_keys")?.into()),
            _ => ExtraKey::Raw(raw.into()),
        })
    }

    fn number(&mut self, what: &'static str) -> Result<Option<u64>, DecodeError> {
        match self.cursor.item()? {
            MsgpackItem::Nil => Ok(None),
            MsgpackItem::Unsigned(value) => Ok(Some(value)),
            _ => Err(DecodeError::Type(what)),
        }
    }

    fn text(&mut self, what: &'static str) -> Result<Option<Box<str>>, DecodeError> {
        match self.cursor.item()? {
            MsgpackItem::Nil => Ok(None),
            MsgpackItem::Text(text) if text.len() > self.limits.text => Err(DecodeError::TooMany("characters")),
            MsgpackItem::Text(text) => Ok(Some(utf8(text, what)?.into())),
            _ => Err(DecodeError::Type(what)),
        }
    }
}

fn utf8<'a>(text: &'a [u8], what: &'static str) -> Result<&'a str, DecodeError> {
    std::str::from_utf8(text).map_err(|_| DecodeError::Type(what))
}

fn hash(item: MsgpackItem<'_>) -> Option<EngineHash> {
    match item {
        MsgpackItem::Unsigned(value) => Some(EngineHash(value)),
        MsgpackItem::Negative(value) => Some(EngineHash::signed(value)),
        MsgpackItem::Bytes(digest) => Some(EngineHash::digest(digest)),
        _ => None,
    }
}

fn build_event(tag: &[u8], fields: EventFields) -> Result<KvCacheEvent, DecodeError> {
    let group = u32::try_from(fields.group).map_err(|_| DecodeError::TooMany("groups"))?;
    let tier = tier_of(fields.medium.as_deref());
    Ok(match tag {
        b"BlockStored" => KvCacheEvent::Stored(BlockStored {
            hashes: fields.hashes,
            parent: fields.parent,
            tokens: fields.tokens,
            block_size: u32::try_from(fields.block_size).map_err(|_| DecodeError::TooMany("tokens a block"))?,
            tier,
            group,
            kind: KvCacheSpecKind::from_name(fields.kind.as_deref()),
            adapter: fields.lora_name.or_else(|| fields.lora_id.map(|id| format!("#{id}").into())),
            salt: fields.salt,
            extra: fields.extra,
        }),
        b"BlockRemoved" => {
            KvCacheEvent::Removed(BlockRemoved { hashes: fields.hashes, tier, group, remaining: fields.remaining })
        }
        b"AllBlocksCleared" => KvCacheEvent::Cleared,
        _ => KvCacheEvent::Other,
    })
}

#[cfg(test)]
mod tests;
