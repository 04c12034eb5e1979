//! Who signed a request, and whether Python has allowed what it asks for.
//!
//! Nothing is decided here. The validator (auth/validator.py) reports what it has granted: an
//! account, from a host, may send to a topic. An equal request with a valid signature is then
//! allowed as well. Everything else is unknown, and is left to the validator. When its rules change,
//! it clears all that it has reported.
//!
//!     content     the values of all extFields except Signature, sorted by name, then the body
//!     Signature   Base64(HMAC-SHA1(secret key, content))

use std::collections::{HashMap, HashSet};

use hmac::{Hmac, KeyInit, Mac};
use pyo3::prelude::*;
use pyo3::types::PyString;
use sha1::Sha1;

use crate::header::SignedFields;

const DIGEST_BYTES: usize = 20;
const DIGEST_TEXT_BYTES: usize = 28;

/// An IPv4 address.
pub type Host = [u8; 4];

/// What is known of a request.
pub enum Access<'a> {
    /// It needs no account.
    Open,
    /// It is signed, and what it asks for was granted.
    Granted(&'a Account),
    /// The validator has to decide.
    Unknown,
}

/// Everything that the validator has granted since its rules changed last.
#[derive(Default)]
pub struct Grants {
    trusted_hosts: HashSet<Host>,
    accounts: HashMap<Box<[u8]>, Account>,
}

pub struct Account {
    pub access_key: Py<PyString>,
    keyed: Hmac<Sha1>, // with the secret key, so that nobody needs to keep the key itself
    topics: HashMap<Host, HashSet<Box<[u8]>>>,
}

impl Grants {
    pub fn trust(&mut self, host: Host) {
        self.trusted_hosts.insert(host);
    }

    pub fn grant(
        &mut self,
        access_key: &Bound<'_, PyString>,
        secret: &[u8],
        host: Host,
        topic: &str,
    ) -> PyResult<()> {
        let key = access_key.to_str()?.as_bytes();
        if !self.accounts.contains_key(key) {
            let Ok(keyed) = Hmac::new_from_slice(secret) else {
                return Ok(()); // it takes keys of any length; without a key nothing is granted
            };
            let account = Account {
                access_key: access_key.clone().unbind(),
                keyed,
                topics: HashMap::new(),
            };
            self.accounts.insert(key.into(), account);
        }
        if let Some(account) = self.accounts.get_mut(key) {
            let topics = account.topics.entry(host).or_default();
            topics.insert(topic.as_bytes().into());
        }
        Ok(())
    }

    /// Return whether a request to send to a topic, or to end a half of it, is allowed.
    /// `properties` are those of a send, decoded.
    pub fn check(
        &self,
        host: Host,
        topic: &[u8],
        fields: &mut SignedFields<'_>,
        properties: &[u8],
        body: &[u8],
    ) -> Access<'_> {
        if self.trusted_hosts.contains(&host) {
            return Access::Open;
        }
        let Some(account) = self.accounts.get(fields.access_key) else {
            return Access::Unknown;
        };
        let is_granted = account
            .topics
            .get(&host)
            .is_some_and(|topics| topics.contains(topic));
        if is_granted && account.has_signed(fields, properties, body) {
            Access::Granted(account)
        } else {
            Access::Unknown
        }
    }
}

impl Account {
    fn has_signed(&self, fields: &mut SignedFields<'_>, properties: &[u8], body: &[u8]) -> bool {
        let Some(signature) = decode_digest(fields.signature) else {
            return false;
        };
        let mut mac = self.keyed.clone();
        for value in fields.sorted_values(properties) {
            mac.update(value);
        }
        mac.update(body);
        mac.verify_slice(&signature).is_ok() // in constant time
    }
}

/// Decode the Base64 text of a digest. Only the one text that an encoder writes is accepted: the
/// Python path compares the texts.
fn decode_digest(text: &[u8]) -> Option<[u8; DIGEST_BYTES]> {
    let [sextets @ .., b'='] = text else {
        return None;
    };
    if text.len() != DIGEST_TEXT_BYTES {
        return None;
    }
    let mut digest = [0; DIGEST_BYTES];
    for (group, bytes) in sextets.chunks(4).zip(digest.chunks_mut(3)) {
        let mut bits = 0u32;
        for letter in group {
            bits = bits << 6 | u32::from(sextet(*letter)?);
        }
        // The last group has three letters for two bytes, and two bits too many.
        if group.len() == 3 {
            if bits & 0b11 != 0 {
                return None;
            }
            bits <<= 6;
        }
        let count = bytes.len();
        bytes.copy_from_slice(&bits.to_be_bytes()[1..=count]);
    }
    Some(digest)
}

fn sextet(letter: u8) -> Option<u8> {
    Some(match letter {
        b'A'..=b'Z' => letter - b'A',
        b'a'..=b'z' => letter - b'a' + 26,
        b'0'..=b'9' => letter - b'0' + 52,
        b'+' => 62,
        b'/' => 63,
        _ => return None,
    })
}
