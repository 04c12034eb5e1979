"""Properties, tags, keys, hashes and ids, compared with the simplest implementation of each."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from escrowmq.message.keys import (
    decode_host,
    decode_offset_id,
    encode_host,
    encode_offset_id,
    java_hash,
    tags_and_keys,
    unsigned_hash,
)
from escrowmq.message.properties import decode_properties, encode_properties, find_property
from escrowmq.store.columns import PendingKeyRun, hash_keys, hash_run, key_hash

TEXT = st.text(
    st.characters(exclude_characters="\x01\x02", exclude_categories=["Cs"]), min_size=1, max_size=9
)
NAMES = st.sampled_from(["TAGS", "KEYS", "UNIQ_KEY", "DELAY", "XTAGS", "TAGSX"]) | TEXT
PROPERTIES = st.dictionaries(NAMES, TEXT | st.sampled_from(["TAGS", "a b", " "]), max_size=6)
# What any client may send: repeated names, empty names or values, bytes that are not text.
RAW_PROPERTIES = st.lists(
    st.sampled_from([b"TAGS", b"KEYS", b"UNIQ_KEY", b"v", b"a b", b"\xff", b"\x01", b"\x02"]),
    max_size=14,
).map(b"".join)
ANY_TEXT = st.text(st.characters(), max_size=40) | st.text("az\ud800\U0001f600é", max_size=600)
HOSTS = st.tuples(st.ip_addresses().map(str), st.integers(0, 65_535))


def reference_hash(text: str) -> int:
    """Return String.hashCode() of Java, computed one UTF-16 unit at a time."""
    units = text.encode("utf-16-be", "surrogatepass")
    value = 0
    for position in range(0, len(units), 2):
        value = (31 * value + units[position] * 256 + units[position + 1]) % (1 << 32)
    return value - (1 << 32) if value >= 1 << 31 else value


@given(PROPERTIES, st.booleans())
def test_properties_are_decoded_with_or_without_the_last_separator(
    properties: dict[str, str], has_last_separator: bool
) -> None:
    encoded = encode_properties(properties)
    assert decode_properties(encoded if has_last_separator else encoded[:-1]) == properties


@given(PROPERTIES, NAMES, st.booleans())
def test_find_property_agrees_with_decode_properties(
    properties: dict[str, str], name: str, has_last_separator: bool
) -> None:
    encoded = encode_properties(properties)
    value = find_property(encoded if has_last_separator else encoded[:-1], name.encode())
    expected = properties.get(name)
    assert value == (None if expected is None else expected.encode())


@given(RAW_PROPERTIES, st.sampled_from(["TAGS", "KEYS", "UNIQ_KEY"]))
@example(b"TAGS\x01a\x02TAGS\x01b\x02", "TAGS")
@example(b"TAGS\x01\x02TAGS\x01b\x02", "TAGS")
def test_find_property_agrees_with_decode_properties_for_any_bytes(
    encoded: bytes, name: str
) -> None:
    value = find_property(encoded, name.encode())
    expected = decode_properties(encoded).get(name)
    assert (None if value is None else value.decode("utf-8", "replace")) == expected


@given(st.binary(max_size=60))
def test_any_bytes_are_decoded_as_properties_with_names_and_values(garbage: bytes) -> None:
    for name, value in decode_properties(garbage).items():
        assert name
        assert value


@given(PROPERTIES, st.sampled_from(["T", "SCHEDULE_TOPIC_XXXX"]), st.integers(0, 1 << 42))
def test_tags_and_keys_agree_with_the_decoded_properties(
    properties: dict[str, str], topic: str, stored_ms: int
) -> None:
    check_tags_and_keys(topic, encode_properties(properties), stored_ms)


@given(RAW_PROPERTIES)
@example(b"TAGS\x01a\x02TAGS\x01b\x02")
@example(b"KEYS\x01a\x02KEYS\x01b\x02")
@example(b"UNIQ_KEY\x01a\x02UNIQ_KEY\x01b\x02")
def test_tags_and_keys_agree_with_the_decoded_properties_for_any_bytes(encoded: bytes) -> None:
    check_tags_and_keys("T", encoded, 0)


def check_tags_and_keys(topic: str, encoded: bytes, stored_ms: int) -> None:
    code, keys = tags_and_keys(topic, encoded, stored_ms)
    properties = decode_properties(encoded)
    unique_keys = [properties["UNIQ_KEY"]] if "UNIQ_KEY" in properties else []
    user_keys = [key for key in properties.get("KEYS", "").split(" ") if key]
    assert [key.decode("utf-8", "replace") for key in keys] == unique_keys + user_keys
    if topic == "T" or not properties.get("DELAY", "").isascii():
        assert code == reference_hash(properties.get("TAGS", ""))


@given(ANY_TEXT)
def test_the_hash_equals_that_of_java(text: str) -> None:
    assert java_hash(text) == reference_hash(text)
    assert unsigned_hash(text) == reference_hash(text) % (1 << 32)


@given(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
)
@example("TopicTest", "aXA4ptp")  # its hash is -2**31, whose absolute value is not an int in Java
@example("T", "")
def test_the_key_hash_is_the_absolute_value_of_javas_hash(topic: str, key: str) -> None:
    assert key_hash(topic, key.encode()) == reference_key_hash(topic, key)


@given(st.text(max_size=9).filter(str.isascii), st.binary(max_size=30))
def test_any_bytes_have_a_key_hash(topic: str, key: bytes) -> None:
    assert key_hash(topic, key) == reference_key_hash(topic, key.decode("utf-8", "replace"))


def reference_key_hash(topic: str, key: str) -> int:
    value = abs(reference_hash(f"{topic}#{key}"))
    return 0 if value == 1 << 31 else value


key_beginnings = st.sampled_from([b"", b"7F0000010001", "\u00e9".encode(), b"x" * 246, b"x" * 300])
key_endings = st.binary(max_size=12) | st.from_regex(rb"\A[0-9A-F]{8}\Z")
topics_and_keys = st.tuples(
    st.sampled_from(["T", "TopicTest", "%RETRY%g"]), key_beginnings, key_endings
)


@given(st.lists(topics_and_keys, max_size=30))
def test_many_keys_are_hashed_like_single_keys(items: list[tuple[str, bytes, bytes]]) -> None:
    topics = [topic for topic, _, _ in items]
    keys = [beginning + ending for _, beginning, ending in items]
    assert hash_keys(topics, keys) == list(map(key_hash, topics, keys))


@given(HOSTS, st.integers(-(1 << 63), (1 << 63) - 1))
def test_encoded_hosts_and_offset_ids_are_decoded_unchanged(
    host: tuple[str, int], log_offset: int
) -> None:
    encoded = encode_host(*host)
    assert decode_host(encoded) == host
    text = encode_offset_id(encoded, log_offset)
    assert len(text) in (32, 56)
    assert decode_offset_id(text) == (encoded, log_offset)


RUNS = st.integers(1, 40).flatmap(
    lambda length: st.tuples(
        st.lists(st.sampled_from(b"Ab\xc3"), min_size=length, max_size=length).map(bytes),
        st.lists(st.binary(min_size=1, max_size=length), min_size=1, max_size=5),
    )
)


@given(TEXT, RUNS)
@example("T", (b"A" * 32, [b"%08X" % number for number in range(3)]))
def test_the_keys_of_a_run_are_hashed_like_single_keys(
    topic: str, run: tuple[bytes, list[bytes]]
) -> None:
    # The keys of a run have the same length, and most of them the same beginning.
    first_key, endings = run
    keys = [first_key[: len(first_key) - len(ending)] + ending for ending in endings]
    hashes = hash_run(PendingKeyRun(topic, keys, list(range(len(keys))), 0))
    assert hashes == [key_hash(topic, key) for key in keys]
