"""Options of a write: missing, misspelt and conflicting ones are refused with a reason."""

from __future__ import annotations

import pytest

from escrowmq.errors import ConfigError
from escrowmq.secret import Secret
from escrowmq.spark.options import WriteOptions, parse_write_options

SERVERS = {"servers": "127.0.0.1:9876"}


def test_options_have_defaults() -> None:
    options = parse_write_options(
        {**SERVERS, "topic": "t", "checkpointlocation": "c"}, is_stream=True
    )
    assert options == WriteOptions(servers="127.0.0.1:9876", topic="t")


def test_names_of_rocketmq_spark_are_aliases() -> None:
    options = parse_write_options({"nameServer": "n:1", "producerGroup": "g"}, is_stream=True)
    assert (options.servers, options.group) == ("n:1", "g")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"servers": ""}, "option servers '': .* expected host:port"),
        ({"tpoic": "t"}, "no option 'tpoic'; did you mean topic"),
        ({"unknown": "t"}, "there are servers, accessKey, .* topic"),
        ({"path": "t"}, "no path: name the topic"),
        ({"guarantee": "once"}, "one of exactly-once, at-least-once"),
        ({"timeout": "soon"}, "timeout 'soon': expected a whole number"),
        ({"batchbytes": "99999999"}, "batchBytes .* the maximum is 3145728"),
        ({"transactional.id": "job"}, "needs both"),
        ({"epoch": "4"}, "needs both"),
        ({"accessKey": "k"}, "belong together"),
        ({"tlsCa": "ca.pem"}, "needs tls=true"),
        ({"transactional.id": "a\x01b", "epoch": "1"}, "printable"),
    ],
)
def test_an_invalid_option_is_refused_with_a_reason(changes: dict[str, str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_write_options({**SERVERS, **changes}, is_stream=False)


def test_the_option_servers_is_required() -> None:
    with pytest.raises(ConfigError, match="option servers is missing"):
        parse_write_options({"topic": "t"}, is_stream=False)


def test_a_secret_is_not_shown() -> None:
    access = {"accessKey": "k", "secretKey": "hidden", "securityToken": "hidden"}
    options = parse_write_options({**SERVERS, **access}, is_stream=True)
    assert options.access.secret_key == Secret("hidden")
    assert "hidden" not in repr(options)


def test_a_stream_refuses_the_option_epoch() -> None:
    with pytest.raises(ConfigError, match="remove it"):
        parse_write_options({**SERVERS, "epoch": "4"}, is_stream=True)
