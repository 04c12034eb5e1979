"""Properties files keep every key and value; any file is read or refused with a ConfigError."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from escrowmq.config import SETTINGS, Setting, load_config
from escrowmq.config.properties_file import read_properties, write_property
from escrowmq.config.setting_types import (
    AddressList,
    Boolean,
    Choice,
    DelayLevels,
    HoursOfDay,
    NumberPerName,
    SecretText,
    SettingType,
    WholeNumber,
)
from escrowmq.errors import ConfigError
from escrowmq.secret import Secret

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
FRAGMENTS = st.sampled_from(
    ["listenPort", "brokerName", "[store]", "=", " ", "\\", "\n", '"', "1", "true", "\\u00", "["]
)
PORTS = st.integers(1, 65_535)


@given(st.lists(st.tuples(TEXT, TEXT)))
def test_written_properties_are_read_unchanged(pairs: list[tuple[str, str]]) -> None:
    text = "\n".join(write_property(key, value) for key, value in pairs)
    assert [(property_.key, property_.value) for property_ in read_properties(text)] == pairs


@given(st.one_of(TEXT, st.lists(FRAGMENTS).map("".join)), st.sampled_from(["conf", "toml"]))
def test_a_garbled_file_is_read_or_refused(text: str, suffix: str) -> None:
    check_file(text.encode(), suffix)


@given(st.binary(max_size=60), st.sampled_from(["conf", "toml"]))
def test_any_bytes_are_read_or_refused(content: bytes, suffix: str) -> None:
    check_file(content, suffix)


def check_file(content: bytes, suffix: str) -> None:
    """Assert that a file is loaded or raises ConfigError, and no other error."""
    with tempfile.NamedTemporaryFile(suffix=f".{suffix}") as file:
        file.write(content)
        file.flush()
        with contextlib.suppress(ConfigError):
            load_config(Path(file.name))


@given(st.sampled_from(SETTINGS), TEXT)
def test_any_text_in_the_environment_is_a_value_or_refused(setting: Setting, text: str) -> None:
    with contextlib.suppress(ConfigError):
        load_config(None, {setting.environment_variable: text})


def values_of(setting_type: SettingType) -> st.SearchStrategy[object]:
    """Return a strategy for valid values of a setting."""
    match setting_type:
        case WholeNumber(minimum=low, maximum=high, multiple_of=step):
            return st.integers(-(-low // step), high // step).map(lambda number: number * step)
        case Boolean():
            return st.booleans()
        case Choice(choices=choices):
            return st.sampled_from(list(choices))
        case AddressList():
            hosts = st.sampled_from(["a", "10.0.0.1", "[::1]", "name_1.example"])
            pairs = st.tuples(hosts, PORTS).map(lambda pair: f"{pair[0]}:{pair[1]}")
            return st.lists(pairs).map(tuple)
        case HoursOfDay():
            return st.lists(st.integers(0, 23), min_size=1).map(tuple)
        case NumberPerName():
            entries = st.tuples(st.sampled_from(["orders", "%RETRY%a", "x-1"]), PORTS)
            return st.lists(entries).map(tuple)
        case DelayLevels():
            seconds = st.integers(0, 10**8).map(lambda number: number * 1_000)
            return st.lists(seconds, min_size=1, max_size=100).map(tuple)
        case SecretText():
            return st.just(Secret(""))  # other secrets are formatted as asterisks
    return st.sampled_from(["a", "host.example", "10.0.0.1"]).map(setting_type.parse)


@given(st.data())
def test_every_formatted_value_can_be_parsed(data: st.DataObject) -> None:
    setting_type = data.draw(st.sampled_from(SETTINGS)).type
    value = data.draw(values_of(setting_type))
    setting_type.check(value)
    assert setting_type.parse(setting_type.format(value).strip()) == value
