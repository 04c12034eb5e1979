"""Users and policies of the ACL file as RocketMQ 5 tools list them, without secrets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.interop.remoting import Response
from tests.support.acl_broker import ADMIN, SECRETS, USER, WRITER, assert_refused, broker_with_acl
from tests.support.brokers import Server
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


def decode_body(response: Response) -> Any:
    """Return the decoded body of a response, or None if it has none. It contains no secret."""
    assert response.code == 0, response.remark
    for secret in SECRETS:
        assert secret.encode() not in response.body
    return json.loads(response.body) if response.body else None


def acl(*entries: dict[str, Any]) -> dict[str, Any]:
    return {
        "subject": "User:alice",
        "policies": [{"policyType": "Custom", "entries": list(entries)}],
    }


def test_users_are_listed_without_passwords(admin: SignedClient) -> None:
    assert decode_body(admin.request(LIST_USERS)) == [ALICE]
    assert decode_body(admin.request(LIST_USERS, {"filter": "lic"})) == [ALICE]
    assert decode_body(admin.request(LIST_USERS, {"filter": "bob"})) == []
    assert decode_body(admin.request(GET_USER, {"username": "alice"})) == ALICE
    assert decode_body(admin.request(GET_USER, {"username": "bob"})) is None


def test_policies_are_listed_as_in_the_file(admin: SignedClient) -> None:
    assert decode_body(admin.request(GET_ACL, {"subject": "User:alice"})) == acl(*ENTRIES)
    assert decode_body(admin.request(GET_ACL, {"subject": "User:bob"})) is None
    assert decode_body(admin.request(LIST_ACLS)) == [acl(*ENTRIES)]
    filters = {"subjectFilter": "alice", "resourceFilter": "orders"}
    assert decode_body(admin.request(LIST_ACLS, filters)) == [acl(ENTRIES[1])]
    assert decode_body(admin.request(LIST_ACLS, {"resourceFilter": "Group:"})) == []


@pytest.mark.parametrize("keys", [WRITER, USER])
@pytest.mark.parametrize("code", [GET_USER, LIST_USERS, GET_ACL, LIST_ACLS, *CHANGES])
def test_users_are_listed_only_for_administrators(
    served: Server, keys: tuple[str, str], code: int
) -> None:
    with SignedClient(served.address, *keys) as client:
        assert_refused(client.request(code, {"username": "alice", "subject": "User:alice"}))


@pytest.mark.parametrize("code", CHANGES)
def test_a_request_to_change_users_is_refused_and_names_the_setting_of_the_file(
    admin: SignedClient, code: int
) -> None:
    response = admin.request(code, {"username": "alice", "subject": "User:alice"}, b"{}")
    assert response.code == NOT_SUPPORTED
    assert "escrowAclFile" in response.remark


def test_a_new_user_is_listed_after_a_reload(tmp_path: Path) -> None:
    new_user = (
        "- {username: robert, password: robert-secret, userType: Super, userStatus: disable}\n"
    )
    with broker_with_acl(tmp_path) as served, SignedClient(served.address, *ADMIN) as admin:
        rules = served.directory / "acl.yml"
        rules.write_text(rules.read_text().replace("users:\n", f"users:\n{new_user}"))
        wait_until(lambda: len(decode_body(admin.request(LIST_USERS))) == 2, "the file is reloaded")
        users = decode_body(admin.request(LIST_USERS))
    robert = {"username": "robert", "userType": "Super", "userStatus": "disable"}
    assert users == [{**robert, "password": "***"}, ALICE]


def test_without_access_control_a_list_of_users_is_refused(tmp_path: Path) -> None:
    with Server(tmp_path) as served, served.client() as client:
        response = client.request(LIST_USERS)
    assert response.code == NOT_SUPPORTED
    assert "aclEnable" in response.remark
