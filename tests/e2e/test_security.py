"""Each rule of security attacked from the wire, against a real server.

What is refused must have had no effect: after an attack the administrator looks at the log's end.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from escrowmq import Access, Consumer, Message, Producer
from escrowmq.cli.main import cli
from escrowmq.errors import EscrowError, NotSent, RequestRefused
from tests.brokers import WAIT_S, NotStarted, Served, free_ports
from tests.interop.remoting import Answer, Sent
from tests.signing import Certificates, SignedClient, signature

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


def guarded(directory: Path, conf: dict[str, object] | None = None, **more: Any) -> Served:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "acl.yml").write_text(RULES)
    access = {"aclEnable": "true", "escrowAclFile": directory / "acl.yml"}
    return Served(directory, conf={**access, **(conf or {})}, **more)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("guarded")
    (port,) = free_ports(1)
    conf = {"metricsExporterType": "PROM", "metricsPromExporterPort": port}
    with guarded(directory, conf) as server:
        with SignedClient(server.address, *ADMIN) as admin:
            for topic in ("orders", "others"):
                admin.create_topic(topic, queues=1)
        yield server
    for secret in SECRETS:
        assert secret not in server.errors, "a secret is in the log"


@pytest.fixture
def admin(served: Served) -> Iterator[SignedClient]:
    with SignedClient(served.address, *ADMIN) as client:
        yield client


def refused(answer: Answer) -> None:
    assert answer.code == NO_PERMISSION, answer
    for secret in SECRETS:
        assert secret not in answer.remark


def send_fields(topic: str, properties: str = "") -> dict[str, str]:
    keys = {"a": "g", "b": topic, "c": "TBW102", "d": "4", "e": "0", "f": "0", "g": "0", "h": "0"}
    return {**keys, "i": properties, "j": "0", "k": "false", "m": "false"}


# --- who asks ------------------------------------------------------------------------------------

FIELDS = send_fields("orders")
GOOD = {**FIELDS, "AccessKey": WRITER[0]}
ATTACKS: dict[str, tuple[dict[str, str], bytes]] = {
    "nothing is signed": (FIELDS, b"x"),
    "a key without a signature": (GOOD, b"x"),
    "a signature without a key": ({**FIELDS, "Signature": "abc"}, b"x"),
    "an empty signature": ({**GOOD, "Signature": ""}, b"x"),
    "another secret": ({**GOOD, "Signature": signature("wrong-secret", GOOD, b"x")}, b"x"),
    "another body": ({**GOOD, "Signature": signature(WRITER[1], GOOD, b"x")}, b"y"),
    "another topic": (
        {**GOOD, "Signature": signature(WRITER[1], GOOD, b"x"), "b": "others"},
        b"x",
    ),
    "a field more": (
        {**GOOD, "Signature": signature(WRITER[1], GOOD, b"x"), "zzz": "1"},
        b"x",
    ),
    "somebody else's key": (
        {**GOOD, "Signature": signature(WRITER[1], GOOD, b"x"), "AccessKey": ADMIN[0]},
        b"x",
    ),
    "an unknown key": (
        {**FIELDS, "AccessKey": "nobody-key", "Signature": signature("nobody-secret", FIELDS, b"")},
        b"x",
    ),
    "not even text": ({**GOOD, "Signature": "\u0000ü\ud7ff"}, b"x"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_who_does_not_sign_right_is_refused(
    served: Served, admin: SignedClient, attack: str
) -> None:
    fields, body = ATTACKS[attack]
    ends = [admin.max_offset(topic, 0) for topic in ("orders", "others")]
    with SignedClient(served.address) as client:
        client.send_raw(310, fields, body)
        assert client.answer_code() == NO_PERMISSION
    assert [admin.max_offset(topic, 0) for topic in ("orders", "others")] == ends


def test_what_is_signed_right_passes_in_every_form(served: Served, admin: SignedClient) -> None:
    end = admin.max_offset("orders", 0)
    with SignedClient(served.address, *WRITER) as client:
        client.send("orders", b"json")
        client.send_binary(310, send_fields("orders"), b"binary")
        assert client.answer_code() == 0
        # Numbers and booleans as such, as C++ clients have them.
        signed = client.signed(send_fields("orders"), b"c++")
        loose = {**signed, "d": 4, "e": 0, "k": False}
        header = {"opaque": 1, "code": 310, "flag": 0, "extFields": loose}
        encoded = json.dumps(header).encode()
        length = 4 + len(encoded) + 3
        client._socket.sendall(struct.pack(">II", length, len(encoded)) + encoded + b"c++")
        assert client.answer_code() == 0
    assert admin.max_offset("orders", 0) == end + 3


def test_the_words_are_the_same_for_a_wrong_key_and_a_wrong_secret(served: Served) -> None:
    with SignedClient(served.address, "nobody-key", "whatever-1") as client:
        unknown = client.request(310, send_fields("orders"), b"x").remark
    with SignedClient(served.address, WRITER[0], "whatever-1") as client:
        assert client.request(310, send_fields("orders"), b"x").remark == unknown


def test_an_account_is_trusted_at_its_address(served: Served) -> None:
    """RocketMQ's rule: there the key alone is enough."""
    with SignedClient(served.address) as client:
        client.send_raw(30, {"topic": "others", "queueId": "0", "AccessKey": "trusted-key"})
        assert client.answer_code() == 0


# --- what he may ---------------------------------------------------------------------------------


def heartbeat(client: SignedClient, group: str, topic: str) -> Answer:
    wanted = {"topic": topic, "subString": "*", "subVersion": 1}
    consumer = {"groupName": group, "subscriptionDataSet": [wanted]}
    body = {"clientID": "c", "producerDataSet": [], "consumerDataSet": [consumer]}
    return client.request(34, body=json.dumps(body).encode())


def lock(client: SignedClient, group: str, topic: str) -> Answer:
    queue = {"topic": topic, "brokerName": "broker-a", "queueId": 0}
    body = {"consumerGroup": group, "clientId": "c", "mqSet": [queue]}
    return client.request(41, body=json.dumps(body).encode())


def offset_fields(group: str, topic: str) -> dict[str, object]:
    return {"consumerGroup": group, "topic": topic, "queueId": 0}


def by_key(topic: str) -> dict[str, object]:
    return {"topic": topic, "key": "k", "maxNum": 1, "beginTimestamp": 0, "endTimestamp": 9}


Ask = Callable[[SignedClient], Answer]
NOT_FOR_WRITER: dict[str, Ask] = {
    "send elsewhere": lambda c: c.request(310, send_fields("others"), b"x"),
    "send to a new topic": lambda c: c.request(310, send_fields("brand-new"), b"x"),
    "send to a group's retries": lambda c: c.request(310, send_fields("%RETRY%readers"), b"x"),
    "send to a group's dead": lambda c: c.request(310, send_fields("%DLQ%readers"), b"x"),
    "send to the halves": lambda c: c.request(310, send_fields("RMQ_SYS_TRANS_HALF_TOPIC"), b"x"),
    "a reply to elsewhere": lambda c: c.request(
        325, send_fields("others", "REPLY_TO_CLIENT\x01c\x02"), b"x"
    ),
    "read": lambda c: c.pull("orders", 0, 0, group="readers"),
    "how far it goes": lambda c: c.request(30, {"topic": "orders", "queueId": 0}),
    "find by key": lambda c: c.request(12, by_key("orders")),
    "another's writer": lambda c: c.request(3702, {"writer": "readers"}),
    "make a topic": lambda c: c.request(
        17, {"topic": "mine", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6}
    ),
    "remove a topic": lambda c: c.request(215, {"topic": "orders"}),
    "make a group": lambda c: c.request(200, body=b'{"groupName":"mine"}'),
    "list transactions": lambda c: c.request(3711),
    "show one": lambda c: c.request(3712, {"transactionId": "x"}),
    "settle one": lambda c: c.request(
        3713, {"transactionId": "x", "commitOrRollback": 8, "reason": "because"}
    ),
    "resume one": lambda c: c.request(3714, {"transactionId": "x"}),
    "resume one, as RocketMQ": lambda c: c.request(323, {"topic": "t", "msgId": "x"}),
    "what nobody has thought of": lambda c: c.request(21),
}
NOT_FOR_READER: dict[str, Ask] = {
    "send": lambda c: c.request(310, send_fields("orders"), b"x"),
    "read elsewhere": lambda c: c.pull("others", 0, 0, group="readers"),
    "read as another group": lambda c: c.pull("orders", 0, 0, group="strangers"),
    "read another's retries": lambda c: c.pull("%RETRY%strangers", 0, 0, group="readers"),
    "read another's dead": lambda c: c.pull("%DLQ%strangers", 0, 0, group="readers"),
    "read halves": lambda c: c.pull("RMQ_SYS_TRANS_HALF_TOPIC", 0, 0, group="readers"),
    "join another group": lambda c: heartbeat(c, "strangers", "orders"),
    "subscribe elsewhere": lambda c: heartbeat(c, "readers", "others"),
    "who is in another group": lambda c: c.request(38, {"consumerGroup": "strangers"}),
    "unregister another group": lambda c: c.request(
        35, {"clientID": "c", "consumerGroup": "strangers"}
    ),
    "another's offset": lambda c: c.request(14, offset_fields("strangers", "orders")),
    "move another's offset": lambda c: c.request(
        15, {**offset_fields("strangers", "orders"), "commitOffset": 9}
    ),
    "move an offset elsewhere": lambda c: c.request(
        15, {**offset_fields("readers", "others"), "commitOffset": 9}
    ),
    "lock for another group": lambda c: lock(c, "strangers", "orders"),
    "lock elsewhere": lambda c: lock(c, "readers", "others"),
    "send back for another group": lambda c: c.request(
        36, {"offset": 0, "group": "strangers", "delayLevel": 0}
    ),
}


@pytest.mark.parametrize("attack", NOT_FOR_WRITER)
def test_what_a_writer_may_not(served: Served, admin: SignedClient, attack: str) -> None:
    ends = [admin.max_offset(topic, 0) for topic in ("orders", "others")]
    with SignedClient(served.address, *WRITER) as client:
        refused(NOT_FOR_WRITER[attack](client))
    assert [admin.max_offset(topic, 0) for topic in ("orders", "others")] == ends


@pytest.mark.parametrize("attack", NOT_FOR_READER)
def test_what_a_reader_may_not(served: Served, attack: str) -> None:
    with SignedClient(served.address, *READER) as client:
        refused(NOT_FOR_READER[attack](client))


def test_nothing_of_that_had_an_effect(served: Served, admin: SignedClient) -> None:
    for group, topic in (("strangers", "orders"), ("readers", "others")):
        assert admin.committed_offset(group, topic, 0) != 9
    assert admin.request(38, {"consumerGroup": "strangers"}).code == 1  # nobody is in it
    with SignedClient(served.namesrv_address, *ADMIN) as names:
        assert names.route("brand-new") is None
        assert names.route("mine") is None


def test_what_they_may(served: Served) -> None:
    with SignedClient(served.address, *WRITER) as writer:
        sent = writer.send("orders", b"to be read")
        writer.send("RMQ_SYS_TRACE_TOPIC", b"every client traces")
        writer.heartbeat("w", producer_groups=("g",))
        assert writer.request(3702, {"writer": "loader"}).code == 0
    with SignedClient(served.address, *READER) as reader:
        assert heartbeat(reader, "readers", "orders").code == 0
        assert reader.pull("orders", 0, sent.queue_offset, group="readers").code == 0
        assert reader.view_by_id(sent.message_id).body == b"to be read"
        reader.commit_offset("readers", "orders", 0, 1)
        assert lock(reader, "readers", "orders").code == 0
    with SignedClient(served.address, *USER) as user:
        user.send("orders", b"of a user with policies")
        refused(user.request(310, send_fields("others"), b"x"))
        refused(user.pull("orders", 0, 0, group="readers"))  # that is for 10.0.0.0/8


def test_a_message_is_shown_by_its_own_topic_whatever_the_request_says(
    served: Served, admin: SignedClient
) -> None:
    hidden = admin.send("others", b"not for the reader")
    with SignedClient(served.address, *READER) as reader:
        offset = int(hidden.message_id[-16:], 16)
        refused(reader.request(33, {"offset": offset, "topic": "orders"}))
        refused(reader.request(36, {"offset": offset, "group": "readers", "delayLevel": 0}))


def half(client: SignedClient, topic: str, key: str) -> Sent:
    return client.send_half(topic, b"half", {"UNIQ_KEY": key}, group="banks")


def test_only_who_may_write_the_topic_ends_a_transaction(
    served: Served, admin: SignedClient
) -> None:
    parked = half(admin, "others", "tx-1")
    end = admin.max_offset("others", 0)
    with SignedClient(served.address, *WRITER) as writer:
        refused(writer.end_transaction(parked, 8, topic="orders", group="banks"))
        refused(writer.end_transaction(parked, 8, topic="", group="banks"))
        places = json.dumps({"halves": [[parked.queue_offset, parked.log_offset]]}).encode()
        refused(writer.request(3701, {"producerGroup": "banks", "commitOrRollback": 8}, places))
        # One way, there is no answer; and there is no effect.
        fields = {"topic": "orders", "producerGroup": "banks", "commitOrRollback": 8}
        at = {"tranStateTableOffset": parked.queue_offset, "commitLogOffset": parked.log_offset}
        writer.one_way(37, {**fields, **at, "msgId": "tx-1"})
        assert writer.request(3702, {"writer": "loader"}).code == 0  # so that one was read
        own = half(writer, "orders", "tx-2")
        assert writer.end_transaction(own, 8, topic="orders", group="banks").code == 0
    assert admin.max_offset("others", 0) == end
    settled = {"transactionId": "tx-1", "commitOrRollback": 12, "reason": "the test is over"}
    assert admin.request(3713, settled).code == 0


def test_only_who_may_write_the_topic_is_asked_about_its_messages(tmp_path: Path) -> None:
    """Whoever names a producer group is a member of it; that alone shows him nothing."""
    quick: dict[str, object] = {"transactionTimeOut": 100, "transactionCheckInterval": 100}
    with guarded(tmp_path, quick) as server, SignedClient(server.address, *READER) as spy:
        spy.heartbeat("spy", producer_groups=("banks",))
        with SignedClient(server.address, *ADMIN) as sender:
            sender.create_topic("orders", queues=1)
            half(sender, "orders", "tx-3")
        spy.heartbeat("spy", producer_groups=("banks",))
        with SignedClient(server.address, *WRITER) as writer:
            writer.heartbeat("writer", producer_groups=("banks",))
            header, body = writer.next_frame()
            assert header["code"] == 39
            assert b"half" in body
        spy.heartbeat("spy", producer_groups=("banks",))
        assert spy.unasked == []


# --- name server and metrics ---------------------------------------------------------------------


def test_the_name_server_asks_too(served: Served) -> None:
    with SignedClient(served.namesrv_address) as stranger:
        refused(stranger.request(105, {"topic": "orders"}))
        refused(stranger.request(106))
    identity = {"brokerName": "evil", "brokerAddr": "10.9.9.9:1", "clusterName": "DefaultCluster"}
    registration = {**identity, "haServerAddr": "", "brokerId": 0, "compressed": False}
    for keys in (("", ""), WRITER, READER, USER):
        with SignedClient(served.namesrv_address, *keys) as client:
            refused(client.request(103, registration, b"{}"))
            refused(client.request(104, {**identity, "brokerName": "broker-a", "brokerId": 0}))
            refused(client.request(216, {"topic": "orders"}))
            refused(client.request(100, {"namespace": "n", "key": "k", "value": "v"}))
    with SignedClient(served.namesrv_address, *READER) as client:
        route = client.route("orders")
        assert route is not None
        assert [broker["brokerName"] for broker in route["brokerDatas"]] == ["broker-a"]


def get(served: Served, path: str, keys: tuple[str, str] | None = None) -> int:
    port = int(served.conf.read_text().partition("metricsPromExporterPort=")[2].split()[0])
    headers = {}
    if keys is not None:
        told = base64.b64encode(":".join(keys).encode()).decode()
        headers["Authorization"] = f"Basic {told}"
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        page = answer.read().decode()
        assert not [secret for secret in SECRETS if secret in page]
        return answer.status
    finally:
        connection.close()


def test_metrics_are_for_administrators(served: Served) -> None:
    assert get(served, "/metrics") == 401
    assert get(served, "/metrics", WRITER) == 401
    assert get(served, "/metrics", (ADMIN[0], "wrong-secret")) == 401
    assert get(served, "/metrics", ("", "")) == 401
    assert get(served, "/metrics", ADMIN) == 200
    assert get(served, "/health/ready") == 200


# --- the file changes ----------------------------------------------------------------------------


def eventually(check: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not check():
        assert time.monotonic() < deadline_s, "it never happened"
        os.sched_yield()


def test_rules_are_read_again_and_broken_ones_are_not_used(tmp_path: Path) -> None:
    with guarded(tmp_path) as server:
        rules = tmp_path / "acl.yml"
        with SignedClient(server.address, *ADMIN) as admin:
            admin.create_topic("orders", queues=1)
        with SignedClient(server.address, *WRITER) as writer:

            def may() -> bool:
                return writer.request(310, send_fields("orders"), b"x").code == 0

            assert may()
            rules.write_text(RULES.replace("[orders=PUB]", "[orders=SUB]"))
            eventually(lambda: not may())
            rules.write_text(RULES)
            eventually(may)
            rules.write_text(RULES + f"\n  {SECRETS[0]}: [")
            eventually(lambda: "cannot be used" in server.errors)
            assert may()
            rules.unlink()
            eventually(lambda: server.errors.count("cannot be used") == 2)
            assert may()
            rules.write_text(RULES.replace(WRITER[1], "changed-secret-9"))
            eventually(lambda: not may())  # on the same connection
        for secret in SECRETS:
            assert secret not in server.errors


# --- open doors ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "conf", "named"),
    [
        ("all", {"brokerIP1": "10.1.2.3"}, "bindAddress=0.0.0.0"),
        ("namesrv", {"bindAddress": "0.0.0.0"}, "bindAddress=0.0.0.0"),
        (
            "broker",
            {"metricsExporterType": "PROM", "metricsPromExporterHost": "0.0.0.0"},
            "metricsPromExporterHost",
        ),
    ],
)
def test_no_door_is_open_without_a_lock(
    tmp_path: Path, role: str, conf: dict[str, object], named: str
) -> None:
    server = Served(tmp_path, role=role, conf=conf)
    with pytest.raises(NotStarted) as caught:
        server.start()
    assert caught.value.exit_code == 2
    assert named in caught.value.errors
    assert "--insecure" in caught.value.errors
    assert not server.data.exists()


def test_whoever_means_it_says_so(tmp_path: Path) -> None:
    server = Served(tmp_path, conf={"bindAddress": "0.0.0.0", "brokerIP1": "127.0.0.1"})
    server.arguments.append("--insecure")
    with server, server.client() as client:
        client.create_topic("orders")
    wide = guarded(tmp_path / "locked", {"bindAddress": "0.0.0.0", "brokerIP1": "127.0.0.1"})
    with wide, SignedClient(wide.address, *ADMIN) as client:
        client.create_topic("orders")


def test_accounts_that_cannot_be_read_stop_the_start(tmp_path: Path) -> None:
    server = guarded(tmp_path)
    (tmp_path / "acl.yml").write_text(
        f"accounts: [{{accessKey: abcdefgh, secretKy: {SECRETS[0]}}}]"
    )
    with pytest.raises(NotStarted) as caught:
        server.start()
    assert "acl.yml" in caught.value.errors
    assert SECRETS[0] not in caught.value.errors


# --- TLS -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def enforcing(
    tmp_path_factory: pytest.TempPathFactory, certificates: Certificates
) -> Iterator[Served]:
    with Served(tmp_path_factory.mktemp("enforcing"), conf=certificates.conf()) as server:
        yield server


def closed(line: socket.socket) -> bool:
    line.settimeout(WAIT_S)
    try:
        while line.recv(4096):  # an alert may come first
            pass
    except ConnectionError:
        pass
    return True


def test_what_goes_through_tls_is_what_was_sent(
    enforcing: Served, certificates: Certificates
) -> None:
    bodies = [bytes([number]) * (number * 40_000) for number in range(1, 11)]
    with SignedClient(enforcing.address, tls=certificates.client()) as client:
        client.create_topic("long", queues=1)
        for body in bodies:
            client.send("long", body)
        assert [record.body for record in client.pull_all("long", 0)] == bodies
    with SignedClient(enforcing.namesrv_address, tls=certificates.client()) as names:
        assert names.route("long") is not None


def test_a_plain_client_does_not_get_in(enforcing: Served) -> None:
    for address in (enforcing.address, enforcing.namesrv_address):
        with pytest.raises(ConnectionError), SignedClient(address) as client:
            client.request(105, {"topic": "orders"})


GARBAGE = {
    "a hello of noise": b"\x16\x03\x01\x02\x00" + b"\xff" * 512,
    "an endless record": b"\x16\x03\x01\xff\xff" + b"\x01" * 70_000,
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "nothing but the first byte, then the end": b"\x16",
}


@pytest.mark.parametrize("what", GARBAGE)
def test_garbage_at_the_door_is_closed(
    enforcing: Served, certificates: Certificates, what: str
) -> None:
    host, port = enforcing.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as line:
        line.sendall(GARBAGE[what])
        if what.endswith("the end"):
            line.shutdown(socket.SHUT_WR)
        assert closed(line)
    with SignedClient(enforcing.address, tls=certificates.client()) as client:
        client.create_topic("still-there")


def test_half_a_handshake_waits_alone_and_not_for_ever(
    enforcing: Served, certificates: Certificates
) -> None:
    host, port = enforcing.address.rsplit(":", 1)
    begun = [socket.create_connection((host, int(port)), timeout=60) for _ in range(50)]
    try:
        for number, line in enumerate(begun):
            line.sendall(b"\x16\x03\x01\x02\x00\x01" if number % 2 else b"")
        with SignedClient(enforcing.address, tls=certificates.client()) as client:
            client.create_topic("quick")  # nobody waits for them
        for line in begun:
            assert closed(line)
    finally:
        for line in begun:
            line.close()


def test_who_does_not_trust_the_server_does_not_talk_to_it(enforcing: Served) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        SignedClient(enforcing.address, tls=ssl.create_default_context())


def test_permissive_serves_both(tmp_path: Path, certificates: Certificates) -> None:
    with Served(tmp_path, conf=certificates.conf("permissive")) as server:
        with server.client() as plain:
            plain.create_topic("orders", queues=1)
            plain.send("orders", b"plain")
        with SignedClient(server.address, tls=certificates.client()) as hidden:
            hidden.send("orders", b"hidden")
            assert [record.body for record in hidden.pull_all("orders", 0)] == [b"plain", b"hidden"]


def test_without_certificates_tls_is_closed_at_once(tmp_path: Path) -> None:
    with Served(tmp_path) as server, pytest.raises((ConnectionError, ssl.SSLError)):
        SignedClient(server.address, tls=ssl.create_default_context())


def test_a_client_must_show_a_certificate_where_one_is_wanted(
    tmp_path: Path, certificates: Certificates
) -> None:
    conf = {
        **certificates.conf(),
        "tls.server.need.client.auth": "require",
        "tls.server.trustCertPath": certificates.ca,
    }
    with Served(tmp_path, conf=conf) as server:  # its broker registered with its name server
        good = certificates.client(certificates.client_pem)
        with SignedClient(server.address, tls=good) as client:
            client.create_topic("orders")
        for bad in (certificates.client(), certificates.client(certificates.stranger_pem)):
            with (
                pytest.raises((ConnectionError, ssl.SSLError)),
                SignedClient(server.address, tls=bad) as client,
            ):
                client.create_topic("orders")


def test_certificates_are_read_again(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path / "certificates")
    with Served(tmp_path, conf=certificates.conf()) as server:

        def shown() -> bytes:
            host, port = server.address.rsplit(":", 1)
            with (
                socket.create_connection((host, int(port)), timeout=WAIT_S) as line,
                certificates.client().wrap_socket(line, server_hostname=host) as tls,
            ):
                return tls.getpeercert(binary_form=True) or b""

        before = shown()
        certificates.key.write_text("no key at all")
        eventually(lambda: "cannot be used" in server.errors)
        assert shown() == before
        certificates.issue()
        eventually(lambda: shown() != before)


# --- our client ----------------------------------------------------------------------------------


async def test_our_client_signs_and_hides(tmp_path: Path, certificates: Certificates) -> None:
    with guarded(tmp_path, certificates.conf()) as server:
        tls = certificates.client()
        with SignedClient(server.address, *ADMIN, tls=tls) as admin:
            admin.create_topic("orders", queues=1)
        servers = server.namesrv_address
        writer = Access(*WRITER, tls=tls)
        async with Producer(servers, group="g", access=writer) as producer:
            await producer.send(Message("orders", b"1"))
            async with producer.transaction(Message("orders", b"2")):
                pass
        subscribe = {"orders": "*"}
        reader = Access(READER[0], READER[1], "a-token", tls=tls)
        async with Consumer(servers, group="readers", subscribe=subscribe, access=reader) as got:
            assert [(await got.receive()).body for _ in range(2)] == [b"1", b"2"]
        async with Producer(servers, group="g", access=reader) as producer:
            with pytest.raises(RequestRefused, match="no permission: PUB on topic orders"):
                await producer.send(Message("orders", b"3"))
        async with Producer(servers, group="g", access=Access(*WRITER)) as producer:
            with pytest.raises(EscrowError):
                await producer.send(Message("orders", b"plain"))
        async with Producer(servers, group="g", access=Access(*WRITER, tls=True)) as producer:
            with pytest.raises(NotSent, match="certificate"):
                await producer.send(Message("orders", b"untrusted"))


def test_an_access_does_not_show_its_secrets() -> None:
    access = Access("key", "secret-1234", "token-1234")
    assert "1234" not in f"{access!r}{access}"
    with pytest.raises(ValueError, match="belong together") as caught:
        Access("", "secret-1234")
    assert "1234" not in str(caught.value)


# --- our commands --------------------------------------------------------------------------------


def escrowmq(*arguments: str, environment: dict[str, str] | None = None) -> tuple[str, Exception]:
    """What it printed, and the error it ended with, if it did."""
    ended = CliRunner().invoke(cli, arguments, env={**BARE, **(environment or {})})
    error = ended.exception
    return ended.output, error if isinstance(error, Exception) else Exception("it ended well")


BARE = dict.fromkeys(name for name in os.environ if name.startswith("ESCROWMQ_"))


def test_a_command_shows_who_it_is(tmp_path: Path, certificates: Certificates) -> None:
    with guarded(tmp_path, certificates.conf()) as server:
        asked = ["transaction", "list", "-n", server.namesrv_address, "--tls-ca"]
        asked.append(str(certificates.ca))
        by_environment = {"ESCROWMQ_ACCESS_KEY": ADMIN[0], "ESCROWMQ_SECRET_KEY": ADMIN[1]}
        file = tmp_path / "tools.yml"
        file.write_text(f"accessKey: {ADMIN[0]}\nsecretKey: {ADMIN[1]}\n")
        for output, error in (
            escrowmq(*asked, environment=by_environment),
            escrowmq(*asked, "--credentials", str(file)),
        ):
            assert str(error) == "it ended well", output
        file.write_text(f"secretKey {ADMIN[1]}")
        refusals = {
            "wants requests with an access key": escrowmq(*asked),
            "belong together": escrowmq(*asked, environment={"ESCROWMQ_SECRET_KEY": ADMIN[1]}),
            "is wrong": escrowmq(*asked, "--access-key", ADMIN[0], "--secret-key", "wrong-wrong"),
            "must have the lines": escrowmq(*asked, "--credentials", str(file)),
        }
        for why, (output, error) in refusals.items():
            assert isinstance(error, EscrowError)
            assert why in str(error)
            assert ADMIN[1] not in f"{output}{error!r}"
