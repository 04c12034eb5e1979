"""Users and policies of the ACL file as RocketMQ 5 tools list them, without secrets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.interop.remoting import Response
from tests.support.acl_broker import ADMIN, SECRETS, USER, WRITER, assert_refused, broker_with_acl
from tests.support.brokers import Served
from tests.support.signing import SignedClient
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

GET_USER, LIST_USERS, GET_ACL, LIST_ACLS = 3004, 3005, 3009, 3010
CHANGES = (3001, 3002, 3003, 3006, 3007, 3008)
NOT_SUPPORTED = 3
ALICE = {
    "username": "alice",
    "password": "***",
    "userType": "Normal",
    "userStatus": "enable",
}
ENTRIES = [
    {"resource": "Topic:or*", "actions": ["Pub"], "decision": "Allow"},
    {
        "resource": "Topic:orders",
        "actions": ["Sub"],
        "sourceIps": ["10.0.0.0/8"],
        "decision": "Allow",
    },
]


def body(answer: Response) -> Any:
    assert answer.code == 0, answer.remark
    for secret in SECRETS:
        assert secret.encode() not in answer.body
    return json.loads(answer.body) if answer.body else None


def acl(*entries: dict[str, Any]) -> dict[str, Any]:
    return {
        "subject": "User:alice",
        "policies": [{"policyType": "Custom", "entries": list(entries)}],
    }


def test_users_are_shown_and_their_passwords_are_not(admin: SignedClient) -> None:
    assert body(admin.request(LIST_USERS)) == [ALICE]
    assert body(admin.request(LIST_USERS, {"filter": "lic"})) == [ALICE]
    assert body(admin.request(LIST_USERS, {"filter": "bob"})) == []
    assert body(admin.request(GET_USER, {"username": "alice"})) == ALICE
    assert body(admin.request(GET_USER, {"username": "bob"})) is None


def test_policies_are_shown_as_in_the_file(admin: SignedClient) -> None:
    assert body(admin.request(GET_ACL, {"subject": "User:alice"})) == acl(*ENTRIES)
    assert body(admin.request(GET_ACL, {"subject": "User:bob"})) is None
    assert body(admin.request(LIST_ACLS)) == [acl(*ENTRIES)]
    only = {"subjectFilter": "alice", "resourceFilter": "orders"}
    assert body(admin.request(LIST_ACLS, only)) == [acl(ENTRIES[1])]
    assert body(admin.request(LIST_ACLS, {"resourceFilter": "Group:"})) == []


@pytest.mark.parametrize("keys", [WRITER, USER])
@pytest.mark.parametrize("code", [GET_USER, LIST_USERS, GET_ACL, LIST_ACLS, *CHANGES])
def test_users_are_shown_to_administrators_only(
    served: Served, keys: tuple[str, str], code: int
) -> None:
    with SignedClient(served.address, *keys) as client:
        assert_refused(client.request(code, {"username": "alice", "subject": "User:alice"}))


@pytest.mark.parametrize("code", CHANGES)
def test_a_request_to_change_users_names_the_file(admin: SignedClient, code: int) -> None:
    answer = admin.request(code, {"username": "alice", "subject": "User:alice"}, b"{}")
    assert answer.code == NOT_SUPPORTED
    assert "escrowAclFile" in answer.remark


def test_users_are_shown_after_a_reload(tmp_path: Path) -> None:
    more = "- {username: robert, password: robert-secret, userType: Super, userStatus: disable}\n"
    with broker_with_acl(tmp_path) as served, SignedClient(served.address, *ADMIN) as admin:
        rules = served.directory / "acl.yml"
        rules.write_text(rules.read_text().replace("users:\n", f"users:\n{more}"))
        wait_until(lambda: len(body(admin.request(LIST_USERS))) == 2, "the file is reloaded")
        found = body(admin.request(LIST_USERS))
    robert = {"username": "robert", "userType": "Super", "userStatus": "disable"}
    assert found == [{**robert, "password": "***"}, ALICE]


def test_without_access_control_users_are_not_shown(tmp_path: Path) -> None:
    with Served(tmp_path) as served, served.client() as client:
        answer = client.request(LIST_USERS)
    assert answer.code == NOT_SUPPORTED
    assert "aclEnable" in answer.remark
