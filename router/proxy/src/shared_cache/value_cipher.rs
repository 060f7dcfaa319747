//! Encrypts values for Redis under a configured secret, bound to their key's name. A value under another secret or
//! another name, or one that was truncated or changed, is not read.

use bytes::{Bytes, BytesMut};
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::hkdf::{HKDF_SHA256, Prk, Salt};
use ring::rand::{SecureRandom as _, SystemRandom};

use vocabulary::Secret;

/// First byte of an encrypted value, and of a plain one.
const ENCRYPTED: u8 = 2;
const PLAIN: u8 = 3;
/// Largest overhead of an encrypted value: version, nonce and tag.
pub(super) const OVERHEAD: usize = 1 + NONCE_LEN + 16;

/// How values are written, and which ones are read.
pub(super) enum ValueCipher {
    /// AES-256-GCM. Each name has its own key, so that no key is used often enough for a nonce to repeat.
    Encrypting { root: Prk, random: SystemRandom },
    /// Not encrypted, where the configuration says so.
    Plain,
}

impl std::fmt::Debug for ValueCipher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if matches!(self, Self::Plain) { "Plain" } else { "Encrypting" })
    }
}

impl ValueCipher {
    /// Encrypts every value if there is a secret, else none.
    pub(super) fn new(secret: Option<&Secret>) -> Self {
        match secret {
            None => Self::Plain,
            Some(secret) => {
                let root = Salt::new(HKDF_SHA256, b"ownerserve soft state").extract(secret.expose().as_bytes());
                Self::Encrypting { root, random: SystemRandom::new() }
            }
        }
    }

    /// Returns `value` as it is stored under `name`; `None` where the system provides no randomness.
    pub(super) fn seal(&self, name: &str, value: &[u8]) -> Option<Vec<u8>> {
        let mut sealed = Vec::with_capacity(OVERHEAD + value.len());
        let Self::Encrypting { root, random } = self else {
            sealed.push(PLAIN);
            sealed.extend_from_slice(value);
            return Some(sealed);
        };
        let mut nonce = [0; NONCE_LEN];
        random.fill(&mut nonce).ok()?;
        sealed.push(ENCRYPTED);
        sealed.extend_from_slice(&nonce);
        sealed.extend_from_slice(value);
        let body = &mut sealed[1 + NONCE_LEN..];
        let nonce = Nonce::assume_unique_for_key(nonce);
        let tag = key(root, name)?.seal_in_place_separate_tag(nonce, Aad::from(name.as_bytes()), body).ok()?;
        sealed.extend_from_slice(tag.as_ref());
        Some(sealed)
    }

    /// Returns first byte and length of an encoded empty value, which is a tombstone.
    pub(super) fn mark(&self) -> (u8, usize) {
        match self {
            Self::Encrypting { .. } => (ENCRYPTED, OVERHEAD),
            Self::Plain => (PLAIN, 1),
        }
    }

    /// Returns the value stored under `name`; `None` for anything else. With a secret, plain values are not read.
    pub(super) fn open(&self, name: &str, sealed: Vec<u8>) -> Option<Bytes> {
        let Self::Encrypting { root, .. } = self else {
            return (sealed.first() == Some(&PLAIN)).then(|| Bytes::from(sealed).slice(1..));
        };
        if sealed.first() != Some(&ENCRYPTED) || sealed.len() < OVERHEAD {
            return None;
        }
        let nonce = Nonce::try_assume_unique_for_key(&sealed[1..=NONCE_LEN]).ok()?;
        let mut body = BytesMut::from(Bytes::from(sealed)).split_off(1 + NONCE_LEN);
        let value = key(root, name)?.open_in_place(nonce, Aad::from(name.as_bytes()), &mut body).ok()?.len();
        body.truncate(value);
        Some(body.freeze())
    }
}

/// Derives the key for one name.
fn key(root: &Prk, name: &str) -> Option<LessSafeKey> {
    let info = [name.as_bytes()];
    let okm = root.expand(&info, &AES_256_GCM).ok()?;
    Some(LessSafeKey::new(UnboundKey::from(okm)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn cipher(secret: &str) -> ValueCipher {
        ValueCipher::new(Some(&Secret::from(secret)))
    }

    #[test]
    fn ciphertext_hides_the_value_and_never_repeats() {
        let sealer = cipher("0123456789abcdef");
        let [one, other] = [(); 2].map(|()| sealer.seal("k", b"the marker is here").unwrap());
        assert_ne!(one, other);
        assert!(!one.windows(6).any(|bytes| bytes == b"marker"));
        assert_eq!(one.len(), OVERHEAD + 18);
    }

    #[test]
    fn encrypted_and_plain_values_are_not_interchangeable() {
        let (encrypting, plain) = (cipher("0123456789abcdef"), ValueCipher::new(None));
        assert_eq!(encrypting.open("k", plain.seal("k", b"v").unwrap()), None);
        assert_eq!(plain.open("k", encrypting.seal("k", b"v").unwrap()), None);
        assert_eq!(plain.open("k", plain.seal("k", b"v").unwrap()).as_deref(), Some(&b"v"[..]));
    }

    proptest! {
        #[test]
        fn a_value_decrypts_only_under_its_name_and_secret(
            name in "[a-z:]{0,12}", other in "[a-z:]{0,12}", value in prop::collection::vec(any::<u8>(), 0..80),
        ) {
            let ours = cipher("0123456789abcdef");
            let sealed = ours.seal(&name, &value).unwrap();
            prop_assert_eq!(cipher("0123456789abcdeg").open(&name, sealed.clone()), None);
            prop_assert_eq!(ours.open(&other, sealed.clone()).is_some(), name == other);
            prop_assert_eq!(ours.open(&name, sealed), Some(Bytes::from(value)));
        }

        #[test]
        fn truncated_or_altered_ciphertext_does_not_decrypt(
            value in prop::collection::vec(any::<u8>(), 0..80), at in any::<prop::sample::Index>(), change in 1u8..,
        ) {
            let ours = cipher("0123456789abcdef");
            let sealed = ours.seal("k", &value).unwrap();
            let at = at.index(sealed.len());
            prop_assert_eq!(ours.open("k", sealed[..at].to_vec()), None);
            let mut changed = sealed;
            changed[at] ^= change;
            prop_assert_eq!(ours.open("k", changed), None);
        }

        #[test]
        fn random_bytes_do_not_decrypt(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            prop_assert_eq!(cipher("0123456789abcdef").open("k", bytes), None);
        }
    }
}
