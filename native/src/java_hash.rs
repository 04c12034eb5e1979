//! Java's `String.hashCode` over ASCII text, which RocketMQ uses for tags and keys.

/// Continue a hash with more characters.
pub fn extend(hash: u32, text: &[u8]) -> u32 {
    text.iter().fold(hash, |hash, byte| {
        hash.wrapping_mul(31).wrapping_add(u32::from(*byte))
    })
}

/// Return the hash of a tag, as a queue entry has it.
pub fn tags_code(tags: &[u8]) -> i64 {
    i64::from(extend(0, tags) as i32)
}

/// Return the hash of `topic#key` in the key index: the absolute value, 0 for -2**31.
pub fn index_hash(topic_hash: u32, key: &[u8]) -> u32 {
    let hash = extend(topic_hash, key) as i32;
    hash.checked_abs().unwrap_or(0) as u32
}

/// Return the hash of `topic#`.
pub fn topic_hash(topic: &[u8]) -> u32 {
    extend(extend(0, topic), b"#")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_those_of_java() {
        assert_eq!(tags_code(b"TagA"), 2_598_919);
        assert_eq!(tags_code(b"polygenelubricants"), i64::from(i32::MIN));
        assert_eq!(index_hash(0, b"polygenelubricants"), 0);
        assert_eq!(topic_hash(b"T"), 84 * 31 + 35);
    }
}
