"""The key-value configuration of a name server, and the content of its file."""

from __future__ import annotations

from typing import Any

import pytest

from escrowmq.errors import ConfigError, RequestRefused
from escrowmq.namesrv.name_server import KvConfig
from escrowmq.namesrv.registration import registration_request
from escrowmq.remoting.codes import ResponseCode
from tests.support.namesrv_requests import A, NameServerHarness, data_version


def test_a_dump_can_be_loaded() -> None:
    settings = KvConfig()
    settings.put("ORDER_TOPIC_CONFIG", "orders", "a:4")
    settings.put("n", "k", "")
    dumped = settings.dump()
    assert dumped == {"configTable": {"ORDER_TOPIC_CONFIG": {"orders": "a:4"}, "n": {"k": ""}}}
    assert KvConfig.load(dumped).dump() == dumped


def test_an_empty_file_has_no_settings() -> None:
    assert KvConfig.load({}).count == 0


@pytest.mark.parametrize(
    "content", [{"configTable": []}, {"configTable": {"n": 1}}, {"configTable": {"n": {"k": 1}}}]
)
def test_a_file_with_an_invalid_table_is_refused(content: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="kvConfig"):
        KvConfig.load(content)


def test_the_revision_advances_only_with_a_change() -> None:
    settings = KvConfig()
    settings.put("n", "k", "v")
    settings.put("n", "k", "w")
    assert settings.revision == 2
    assert not settings.delete("n", "other")
    assert settings.get("n", "k") == "w"
    assert settings.revision == 2
    assert settings.delete("n", "k")
    assert settings.revision == 3


def test_changes_of_a_returned_table_have_no_effect() -> None:
    settings = KvConfig()
    settings.put("n", "k", "v")
    table = settings.namespace("n")
    assert table is not None
    table["k"] = "changed"
    settings.dump()["configTable"]["n"]["k"] = "changed"
    assert settings.get("n", "k") == "v"


@pytest.mark.parametrize(
    ("namespace", "key", "value", "reason"),
    [
        ("", "k", "v", "namespace is empty"),
        ("n", "", "v", "key is empty"),
        ("n" * 513, "k", "v", "namespace has 513 characters"),
        ("n", "k" * 513, "v", "key has 513 characters"),
        ("n", "k", "v" * 65_537, "value has 65537 characters"),
    ],
)
def test_names_and_values_have_limits(namespace: str, key: str, value: str, reason: str) -> None:
    settings = KvConfig()
    with pytest.raises(RequestRefused, match=reason):
        settings.put(namespace, key, value)
    assert (settings.dump(), settings.revision) == ({"configTable": {}}, 0)


def test_at_the_limit_a_setting_can_be_changed_but_none_added() -> None:
    settings = KvConfig(entries_max=1)
    settings.put("n", "k", "v")
    with pytest.raises(RequestRefused, match="there are 1 settings"):
        settings.put("n", "l", "v")
    settings.put("n", "k", "w")
    assert settings.dump() == {"configTable": {"n": {"k": "w"}}}


def test_a_namespace_always_fits_into_a_response() -> None:
    harness = NameServerHarness()

    def put_many() -> None:
        for number in range(61):  # JSON writes each of these characters as six
            harness.server.kv_config.put("ORDER_TOPIC_CONFIG", f"k{number}", "\x01" * 65_000)

    with pytest.raises(RequestRefused, match="bytes as JSON"):
        put_many()
    registration = registration_request(A, [], data_version())
    response = harness.call(registration.code, registration.fields, registration.body)
    assert (response.code, response.remark) == (ResponseCode.SUCCESS, "")
