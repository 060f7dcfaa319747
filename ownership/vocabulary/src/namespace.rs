//! Properties that must be equal before two prompts may share KV. Their hash is the root of every chain.

use serde::{Deserialize, Serialize};
use std::sync::Arc;
use xxhash_rust::xxh3::Xxh3;

use crate::{HashSeed, ModelId, PrefixId};

/// Model-side properties of a chain's root. Workers and prompts get them from configuration.
#[derive(Clone, PartialEq, Eq, Hash, Serialize, Deserialize, Debug)]
pub struct ModelNamespace {
    /// Name of the served model.
    pub model: ModelId,
    /// Revision of the weights; empty if unknown.
    pub revision: Arc<str>,
    /// Digest of the tokenizer and the chat template; empty for chains over bytes.
    pub tokenizer: Arc<str>,
}

/// Request-side properties of a chain's root.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct RequestNamespace<'a> {
    /// Name of the LoRA adapter.
    pub adapter: Option<&'a str>,
    /// Cache salt of the tenant.
    pub salt: Option<&'a str>,
    /// Digest of the images or audio in the prompt.
    pub content: Option<&'a str>,
}

impl ModelNamespace {
    /// Returns the root of all chains with these properties: xxh3-128 over the length-prefixed fields in declaration
    /// order.
    pub fn root(&self, seed: HashSeed, keys: RequestNamespace<'_>) -> PrefixId {
        let mut hash = Xxh3::with_seed(seed.0);
        let fields = [
            Some(&*self.model.0),
            Some(&*self.revision),
            Some(&*self.tokenizer),
            keys.adapter,
            keys.salt,
            keys.content,
        ];
        for field in fields {
            match field {
                None => hash.update(&u64::MAX.to_le_bytes()),
                Some(text) => {
                    hash.update(&(text.len() as u64).to_le_bytes());
                    hash.update(text.as_bytes());
                }
            }
        }
        PrefixId(hash.digest128())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_namespace_field_changes_the_root() {
        let base = ModelNamespace { model: "m".into(), revision: "r".into(), tokenizer: "t".into() };
        let other = |change: fn(&mut ModelNamespace)| {
            let mut namespace = base.clone();
            change(&mut namespace);
            namespace.root(HashSeed(1), RequestNamespace::default())
        };
        let roots = [
            base.root(HashSeed(1), RequestNamespace::default()),
            base.root(HashSeed(2), RequestNamespace::default()),
            other(|n| n.model = "n".into()),
            other(|n| n.revision = "".into()),
            other(|n| n.tokenizer = "".into()),
            base.root(HashSeed(1), RequestNamespace { adapter: Some("x"), ..RequestNamespace::default() }),
            base.root(HashSeed(1), RequestNamespace { salt: Some("x"), ..RequestNamespace::default() }),
            base.root(HashSeed(1), RequestNamespace { content: Some("x"), ..RequestNamespace::default() }),
            base.root(HashSeed(1), RequestNamespace { salt: Some(""), ..RequestNamespace::default() }),
        ];
        for (i, a) in roots.iter().enumerate() {
            for b in &roots[..i] {
                assert_ne!(a, b);
            }
        }
    }
}
