"""A broker with access control, and its accounts.

Tests attack each rule over the network. A refused request must have no effect, so they compare the
end of the log before and after.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.interop.remoting import Response
from tests.support.brokers import Served

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
) -> Served:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "acl.yml").write_text(RULES)
    access = {"aclEnable": "true", "escrowAclFile": directory / "acl.yml"}
    return Served(directory, conf={**access, **(conf or {})}, **options)


def assert_refused(answer: Response) -> None:
    assert answer.code == NO_PERMISSION, answer
    for secret in SECRETS:
        assert secret not in answer.remark


def send_fields(topic: str, properties: str = "") -> dict[str, str]:
    keys = {"a": "g", "b": topic, "c": "TBW102", "d": "4", "e": "0", "f": "0", "g": "0", "h": "0"}
    return {**keys, "i": properties, "j": "0", "k": "false", "m": "false"}
