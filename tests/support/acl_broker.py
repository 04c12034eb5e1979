"""A broker with access control, its accounts and its rules.

Tests try to break each rule over the network. A refused request must have no effect, so the tests
compare the end of the log before and after it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.interop.remoting import Response
from tests.support.brokers import Server

NO_PERMISSION = 16
ADMIN = "operator-key", "operator-secret-1"
WRITER = "writer-key", "writer-secret-22"
READER = "reader-key", "reader-secret-33"
USER = "alice", "alice-secret-44"
SECRETS = [secret for _, secret in (ADMIN, WRITER, READER, USER)]
RULES = f"""
accounts:
- {{accessKey: {ADMIN[0]}, secretKey: {ADMIN[1]}, admin: true}}
- accessKey: {WRITER[0]}
  secretKey: {WRITER[1]}
  topicPerms: [orders=PUB]
  groupPerms: [loader=PUB]
- accessKey: {READER[0]}
  secretKey: {READER[1]}
  topicPerms: [orders=SUB]
  groupPerms: [readers=SUB]
- accessKey: trusted-key
  secretKey: trusted-secret-5
  whiteRemoteAddress: 127.0.0.1
users:
- {{username: {USER[0]}, password: {USER[1]}}}
acls:
- subject: User:{USER[0]}
  policies:
  - entries:
    - {{resource: "Topic:or*", actions: [Pub], decision: Allow}}
    - {{resource: "Topic:orders", actions: [Sub], sourceIps: [10.0.0.0/8], decision: Allow}}
"""


def broker_with_acl(
    directory: Path, conf: dict[str, object] | None = None, **options: Any
) -> Server:
    """Return a server, not started, that enforces RULES."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "acl.yml").write_text(RULES)
    acl_settings = {"aclEnable": "true", "escrowAclFile": directory / "acl.yml"}
    return Server(directory, conf={**acl_settings, **(conf or {})}, **options)


def assert_refused(response: Response) -> None:
    """Assert that permission was denied, and that the remark does not reveal a secret."""
    assert response.code == NO_PERMISSION, response
    for secret in SECRETS:
        assert secret not in response.remark


def send_fields(topic: str, properties: str = "") -> dict[str, str]:
    """Return the header of SEND_MESSAGE_V2, whose field names are single letters."""
    fields = {"a": "g", "b": topic, "c": "TBW102", "d": "4", "e": "0", "f": "0", "g": "0", "h": "0"}
    return {**fields, "i": properties, "j": "0", "k": "false", "m": "false"}
