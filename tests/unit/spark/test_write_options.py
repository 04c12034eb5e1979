"""The sink's options: what is missing, misspelt or does not fit together is said in words."""

from __future__ import annotations

import pytest

from escrowmq.errors import ConfigError
from escrowmq.spark.options import WriteOptions, parse_write_options

SERVERS = {"servers": "127.0.0.1:9876"}


def test_what_is_not_said_has_a_default() -> None:
    found = parse_write_options(
        {**SERVERS, "topic": "t", "checkpointlocation": "c"}, is_stream=True
    )
    assert found == WriteOptions(servers="127.0.0.1:9876", topic="t")


def test_the_names_of_rocketmq_spark_are_known_too() -> None:
    found = parse_write_options({"nameServer": "n:1", "producerGroup": "g"}, is_stream=True)
    assert (found.servers, found.group) == ("n:1", "g")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"servers": ""}, "option servers '': .* expected host:port"),
        ({"tpoic": "t"}, "no option 'tpoic'; did you mean topic"),
        ({"whatever": "t"}, "there are servers, accessKey, .* topic"),
        ({"path": "t"}, "no path: name the topic"),
        ({"guarantee": "once"}, "one of exactly-once, at-least-once"),
        ({"timeout": "soon"}, "timeout 'soon': a whole number"),
        ({"batchbytes": "99999999"}, "batchBytes .* 3145728 at most"),
        ({"transactional.id": "job"}, "needs both"),
        ({"epoch": "4"}, "needs both"),
        ({"accessKey": "k"}, "go together"),
        ({"tlsCa": "ca.pem"}, "needs tls=true"),
        ({"transactional.id": "a\x01b", "epoch": "1"}, "printable"),
    ],
)
def test_a_bad_option_says_what_to_write_instead(given: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_write_options({**SERVERS, **given}, is_stream=False)


def test_servers_are_needed() -> None:
    with pytest.raises(ConfigError, match="option servers is missing"):
        parse_write_options({"topic": "t"}, is_stream=False)


def test_a_secret_is_not_shown() -> None:
    access = {"accessKey": "k", "secretKey": "hidden", "securityToken": "hidden"}
    found = parse_write_options({**SERVERS, **access}, is_stream=True)
    assert found.access.secret_key == "hidden"
    assert "hidden" not in repr(found)


def test_a_stream_counts_its_epochs_itself() -> None:
    with pytest.raises(ConfigError, match="leave it out"):
        parse_write_options({**SERVERS, "epoch": "4"}, is_stream=True)
