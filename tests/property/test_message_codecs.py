"""Properties, hashes, ids and facts, against the plainest implementation of each."""

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
# What a stranger may send: names twice, sides that are empty, bytes that are no text.
RAW_PROPERTIES = st.lists(
    st.sampled_from([b"TAGS", b"KEYS", b"UNIQ_KEY", b"v", b"a b", b"\xff", b"\x01", b"\x02"]),
    max_size=14,
).map(b"".join)
ANY_TEXT = st.text(st.characters(), max_size=40) | st.text("az\ud800\U0001f600é", max_size=600)
HOSTS = st.tuples(st.ip_addresses().map(str), st.integers(0, 65_535))


def naive_hash(text: str) -> int:
    units = text.encode("utf-16-be", "surrogatepass")
    value = 0
    for at in range(0, len(units), 2):
        value = (31 * value + units[at] * 256 + units[at + 1]) % (1 << 32)
    return value - (1 << 32) if value >= 1 << 31 else value


@given(PROPERTIES, st.booleans())
def test_properties_come_back_with_or_without_the_last_separator(
    properties: dict[str, str], ended: bool
) -> None:
    encoded = encode_properties(properties)
    assert decode_properties(encoded if ended else encoded[:-1]) == properties


@given(PROPERTIES, NAMES, st.booleans())
def test_finding_one_agrees_with_decoding_all(
    properties: dict[str, str], name: str, ended: bool
) -> None:
    encoded = encode_properties(properties)
    found = find_property(encoded if ended else encoded[:-1], name.encode())
    expected = properties.get(name)
    assert found == (None if expected is None else expected.encode())


@given(RAW_PROPERTIES, st.sampled_from(["TAGS", "KEYS", "UNIQ_KEY"]))
@example(b"TAGS\x01a\x02TAGS\x01b\x02", "TAGS")
@example(b"TAGS\x01\x02TAGS\x01b\x02", "TAGS")
def test_finding_one_agrees_with_decoding_all_of_any_bytes(encoded: bytes, name: str) -> None:
    found = find_property(encoded, name.encode())
    expected = decode_properties(encoded).get(name)
    assert (None if found is None else found.decode("utf-8", "replace")) == expected


@given(st.binary(max_size=60))
def test_any_bytes_are_read_as_properties(garbage: bytes) -> None:
    for name, value in decode_properties(garbage).items():
        assert name
        assert value


@given(PROPERTIES, st.sampled_from(["T", "SCHEDULE_TOPIC_XXXX"]), st.integers(0, 1 << 42))
def test_tags_and_keys_agree_with_the_decoded_properties(
    properties: dict[str, str], topic: str, stored_ms: int
) -> None:
    check_facts(topic, encode_properties(properties), stored_ms)


@given(RAW_PROPERTIES)
@example(b"TAGS\x01a\x02TAGS\x01b\x02")
@example(b"KEYS\x01a\x02KEYS\x01b\x02")
@example(b"UNIQ_KEY\x01a\x02UNIQ_KEY\x01b\x02")
def test_tags_and_keys_agree_with_decoded_properties_of_any_bytes(encoded: bytes) -> None:
    check_facts("T", encoded, 0)


def check_facts(topic: str, encoded: bytes, stored_ms: int) -> None:
    code, keys = tags_and_keys(topic, encoded, stored_ms)
    properties = decode_properties(encoded)
    unique = [properties["UNIQ_KEY"]] if "UNIQ_KEY" in properties else []
    users = [key for key in properties.get("KEYS", "").split(" ") if key]
    assert [key.decode("utf-8", "replace") for key in keys] == unique + users
    if topic == "T" or not properties.get("DELAY", "").isascii():
        assert code == naive_hash(properties.get("TAGS", ""))


@given(ANY_TEXT)
def test_the_hash_is_that_of_java(text: str) -> None:
    assert java_hash(text) == naive_hash(text)
    assert unsigned_hash(text) == naive_hash(text) % (1 << 32)


@given(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
)
@example("TopicTest", "aXA4ptp")  # hashes to the number that has no absolute value
@example("T", "")
def test_the_key_hash_is_the_absolute_value_of_that_of_java(topic: str, key: str) -> None:
    value = abs(naive_hash(f"{topic}#{key}"))
    assert key_hash(topic, key.encode()) == (0 if value == 1 << 31 else value)


@given(st.text(max_size=9).filter(str.isascii), st.binary(max_size=30))
def test_any_bytes_have_a_key_hash(topic: str, key: bytes) -> None:
    value = abs(naive_hash(f"{topic}#{key.decode('utf-8', 'replace')}"))
    assert key_hash(topic, key) == (0 if value == 1 << 31 else value)


heads = st.sampled_from([b"", b"7F0000010001", "\u00e9".encode(), b"x" * 246, b"x" * 300])
tails = st.binary(max_size=12) | st.from_regex(rb"\A[0-9A-F]{8}\Z")
waiting = st.tuples(st.sampled_from(["T", "TopicTest", "%RETRY%g"]), heads, tails)


@given(st.lists(waiting, max_size=30))
def test_many_keys_are_hashed_as_each_of_them(keys: list[tuple[str, bytes, bytes]]) -> None:
    topics, texts = [topic for topic, _, _ in keys], [head + tail for _, head, tail in keys]
    assert hash_keys(topics, texts) == list(map(key_hash, topics, texts))


@given(HOSTS, st.integers(-(1 << 63), (1 << 63) - 1))
def test_hosts_and_offset_ids_come_back(host: tuple[str, int], log_offset: int) -> None:
    encoded = encode_host(*host)
    assert decode_host(encoded) == host
    text = encode_offset_id(encoded, log_offset)
    assert len(text) in (32, 56)
    assert decode_offset_id(text) == (encoded, log_offset)


RUNS = st.integers(1, 40).flatmap(
    lambda length: st.tuples(
        st.lists(st.sampled_from([b"A", b"b", b"\xc3"]), min_size=length, max_size=length),
        st.lists(st.binary(min_size=1, max_size=length), min_size=1, max_size=5),
    )
)


@given(TEXT, RUNS)
@example("T", ([b"A"] * 32, [b"%08X" % number for number in range(3)]))
def test_keys_of_a_run_are_hashed_like_each_alone(
    topic: str, run: tuple[list[bytes], list[bytes]]
) -> None:
    """Keys of one length, most of which begin alike."""
    common, ends = run
    whole = b"".join(common)
    keys = [(whole[: len(common) - len(end)] + end)[: len(common)] for end in ends]
    keys = [key.ljust(len(common), b"x") for key in keys]
    found = hash_run(PendingKeyRun(topic, keys, list(range(len(keys))), 0))
    assert found == [key_hash(topic, key) for key in keys]
