"""One conversation with a broker and its name server: a request of each kind, in a fixed order.

    shapes = Conversation(address, namesrv_address).run()     {"GET_MAX_OFFSET": {...}, ...}

It runs against Apache RocketMQ and against ours. The shapes of the responses, and of the requests
that the broker sends to its clients, are compared. The broker needs SETTINGS, and an empty store.

    python -m tests.interop.conversation [VERSION ...]        capture those of Apache RocketMQ again
"""

from __future__ import annotations

import json
import struct
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tests.interop.apache import ApacheRocketMQ
from tests.interop.fixtures import FIXTURES, VERSIONS
from tests.interop.records import encode_properties
from tests.interop.remoting import RESPONSE, Client, SendResult
from tests.interop.shapes import Shape, frame_shape
from tests.support.waiting import wait_until

SETTINGS: Final[dict[str, object]] = {
    "transactionTimeOut": 1000,
    "transactionCheckInterval": 1000,
    "enablePropertyFilter": True,
    "autoCreateTopicEnable": True,
}
TOPIC: Final = "shapes"
GROUP: Final = "readers"
PRODUCERS: Final = "interop-producers"
CLUSTER: Final = "DefaultCluster"
BROKER: Final = "broker-a"
MEMBER: Final = "127.0.0.1@member"
ASKER: Final = "127.0.0.1@asker"
PATIENCE_S: Final = 30.0  # for a check, which is due after a second or two

_PULL: Final = {
    "consumerGroup": GROUP,
    "topic": TOPIC,
    "queueId": 0,
    "queueOffset": 0,
    "maxMsgNums": 1,
    "sysFlag": 4,
    "commitOffset": 0,
    "suspendTimeoutMillis": 0,
    "subscription": "*",
    "subVersion": 0,
    "expressionType": "TAG",
}


class Conversation:
    def __init__(self, address: str, namesrv_address: str, *, is_old: bool = False) -> None:
        """Prepare a conversation. A name server of 4.x (`is_old`) ignores unknown requests."""
        self._address, self._namesrv_address = address, namesrv_address
        self._is_old = is_old
        self.shapes: dict[str, Shape] = {}

    def run(self) -> dict[str, Shape]:
        with (
            Client(self._address) as broker,
            Client(self._address) as member,
            Client(self._namesrv_address) as namesrv,
        ):
            self._broker, self._member, self._namesrv = broker, member, namesrv
            self._metadata()
            self._sends()
            self._batches()
            self._reads()
            self._offsets()
            self._groups()
            self._replies()
            self._transactions()
            self._statistics()
            self._broker_itself()
            self._name_server()
            self._deletions()
        return self.shapes

    def _ask(
        self,
        name: str,
        code: int,
        fields: Mapping[str, object] | None = None,
        body: bytes = b"",
        *,
        client: Client | None = None,
    ) -> None:
        asked = client or self._broker
        asked.request(code, fields, body)
        self.shapes[name] = frame_shape(asked.received_frame)

    def _ask_namesrv(
        self, name: str, code: int, fields: Mapping[str, object] | None = None, body: bytes = b""
    ) -> None:
        self._ask(name, code, fields, body, client=self._namesrv)

    def _receive_request(self, name: str, client: Client, code: int) -> dict[str, Any]:
        """Note the shape of the next request of this code that the broker sends to a client."""
        client.socket.settimeout(PATIENCE_S)
        while True:
            header, _ = client.receive_frame()
            if header["code"] == code and not header["flag"] & RESPONSE:
                self.shapes[f"to client: {name}"] = frame_shape(client.received_frame)
                return header

    # --- topics and groups -----------------------------------------------------------------------

    def _metadata(self) -> None:
        topic = {
            "topic": TOPIC,
            "defaultTopic": "TBW102",
            "readQueueNums": 2,
            "writeQueueNums": 2,
            "perm": 6,
            "topicFilterType": "SINGLE_TAG",
            "topicSysFlag": 0,
            "order": False,
        }
        self._ask("UPDATE_AND_CREATE_TOPIC", 17, topic)
        self._ask("UPDATE_AND_CREATE_TOPIC, invalid name", 17, {**topic, "topic": "a b"})
        self._ask("UPDATE_AND_CREATE_SUBSCRIPTIONGROUP", 200, body=_json({"groupName": GROUP}))
        self._broker.create_group("copies")
        self._ask("GET_ALL_TOPIC_CONFIG", 21)
        self._ask("GET_TOPIC_CONFIG", 351, {"topic": TOPIC})
        self._ask("GET_TOPIC_CONFIG, unknown", 351, {"topic": "no-such-topic"})
        self._ask("GET_ALL_SUBSCRIPTIONGROUP_CONFIG", 201)
        self._ask("GET_SUBSCRIPTIONGROUP_CONFIG", 352, {"group": GROUP})
        self._ask("GET_SYSTEM_TOPIC_LIST_FROM_BROKER", 305)
        self._ask("unsupported", 9_999)

    # --- messages --------------------------------------------------------------------------------

    def _sends(self) -> None:
        self._ask("SEND_MESSAGE", 10, _send_v1(), b"1")
        self._sent = self._broker.send(
            TOPIC, b"2", {"UNIQ_KEY": "U1", "KEYS": "k"}, group=PRODUCERS
        )
        self.shapes["SEND_MESSAGE_V2"] = frame_shape(self._broker.received_frame)
        self._broker.send(TOPIC, b"3", {"UNIQ_KEY": "U2", "DELAY": "18"})
        self.shapes["SEND_MESSAGE_V2, delayed"] = frame_shape(self._broker.received_frame)
        unknown = _send_v1(topic="no-such-topic", defaultTopic="no-template")
        self._ask("SEND_MESSAGE, unknown topic", 10, unknown, b"1")
        self._ask("SEND_MESSAGE, no such queue", 10, _send_v1(queueId=77), b"1")
        retry = _send_v1(topic="%RETRY%new-group", reconsumeTimes=1)
        self._ask("SEND_MESSAGE, retry of a new group", 10, retry, b"1")
        back = {"offset": self._sent.log_offset, "group": GROUP, "delayLevel": 18}
        self._ask("CONSUMER_SEND_MSG_BACK", 36, {**back, "originMsgId": "", "originTopic": TOPIC})
        self._ask("CONSUMER_SEND_MSG_BACK, unknown group", 36, {**back, "group": "no-such-group"})

    def _batches(self) -> None:
        fields = {"a": PRODUCERS, "b": TOPIC, "c": "TBW102", "d": 4, "e": 1, "f": 0}
        fields |= {"g": _now_ms(), "h": 0, "i": "", "j": 0, "k": False, "m": True}
        self._ask("SEND_BATCH_MESSAGE", 320, fields, _batch(b"a", b"b"))
        self._ask("SEND_BATCH_MESSAGE, delayed inside", 320, fields, _batch(b"c", delay="3"))
        # RocketMQ writes queue entries after it has responded.
        wait_until(
            lambda: self._broker.max_offset(TOPIC, 1) == 3,
            "a delay inside a batch counts nowhere",
        )
        delayed = {**fields, "i": encode_properties({"DELAY": "3"})}
        self._ask("SEND_BATCH_MESSAGE, delayed", 320, delayed, _batch(b"d"))

    # --- reading ---------------------------------------------------------------------------------

    def _reads(self) -> None:
        self._ask("PULL_MESSAGE", 11, _PULL)
        self._ask("PULL_MESSAGE, at the end", 11, {**_PULL, "queueOffset": 2})
        self._ask("PULL_MESSAGE, past the end", 11, {**_PULL, "queueOffset": 99})
        self._ask("PULL_MESSAGE, no match", 11, {**_PULL, "subscription": "none"})
        self._ask("PULL_MESSAGE, unknown topic", 11, {**_PULL, "topic": "no-such-topic"})
        self._ask("PULL_MESSAGE, no such queue", 11, {**_PULL, "queueId": 77})
        bad = {**_PULL, "subscription": "a >", "expressionType": "SQL92"}
        self._ask("PULL_MESSAGE, bad expression", 11, bad)
        self._ask("PULL_MESSAGE, no subscription", 11, {**_PULL, "sysFlag": 0})
        self._ask("LITE_PULL_MESSAGE", 361, {**_PULL, "sysFlag": 20})
        self._ask("VIEW_MESSAGE_BY_ID", 33, {"offset": self._sent.log_offset})
        query = {"topic": TOPIC, "maxNum": 5, "beginTimestamp": 0, "endTimestamp": 2**63 - 1}
        self._await(12, {**query, "key": "k"})
        self._ask("QUERY_MESSAGE", 12, {**query, "key": "k"})
        self._ask("QUERY_MESSAGE, not found", 12, {**query, "key": "no-such-key"})

    def _await(self, code: int, fields: Mapping[str, object]) -> None:
        """Wait until the request succeeds: the index may be a moment late."""
        deadline_s = time.monotonic() + PATIENCE_S
        while self._broker.request(code, fields).code != 0:
            assert time.monotonic() < deadline_s, f"request {code} never succeeds"
            time.sleep(0.1)

    def _offsets(self) -> None:
        queue = {"topic": TOPIC, "queueId": 0}
        commit = {**queue, "consumerGroup": GROUP, "commitOffset": 1}
        self._ask("UPDATE_CONSUMER_OFFSET", 15, commit)
        self._ask("QUERY_CONSUMER_OFFSET", 14, {**queue, "consumerGroup": GROUP})
        never = {**queue, "consumerGroup": "new", "setZeroIfNotFound": False}
        self._ask("QUERY_CONSUMER_OFFSET, none", 14, {**never, "queueId": 1})
        self._ask("SEARCH_OFFSET_BY_TIMESTAMP", 29, {**queue, "timestamp": 0})
        self._ask("GET_MAX_OFFSET", 30, queue)
        self._ask("GET_MIN_OFFSET", 31, queue)
        self._ask("GET_EARLIEST_MSG_STORETIME", 32, queue)
        self._ask("GET_ALL_CONSUMER_OFFSET", 43)

    # --- clients ---------------------------------------------------------------------------------

    def _groups(self) -> None:
        self._ask("HEART_BEAT, producer", 34, body=_producer_heartbeat(ASKER))
        self._ask("HEART_BEAT, consumer", 34, body=_heartbeat(MEMBER), client=self._member)
        second = _heartbeat("127.0.0.1@second")
        self._ask("HEART_BEAT, second consumer", 34, body=second)
        self._receive_request("NOTIFY_CONSUMER_IDS_CHANGED", self._member, 40)
        self._ask("GET_CONSUMER_LIST_BY_GROUP", 38, {"consumerGroup": GROUP})
        self._ask("GET_CONSUMER_LIST_BY_GROUP, unknown", 38, {"consumerGroup": "no-such-group"})
        self._ask("GET_CONSUMER_CONNECTION_LIST", 203, {"consumerGroup": GROUP})
        self._ask("GET_CONSUMER_CONNECTION_LIST, unknown", 203, {"consumerGroup": "no-such-group"})
        self._ask("GET_PRODUCER_CONNECTION_LIST", 204, {"producerGroup": PRODUCERS})
        self._ask("GET_ALL_PRODUCER_INFO", 328)
        subscription = {"topic": TOPIC, "subString": "a >", "expressionType": "SQL92"}
        config = {"clientId": MEMBER, "group": GROUP, "namespace": ""}
        body = _json({**config, "subscriptionData": subscription})
        self._ask("CHECK_CLIENT_CONFIG, bad expression", 46, body=body)
        lock = _json({"consumerGroup": GROUP, "clientId": MEMBER, "mqSet": [_queue(0)]})
        self._ask("LOCK_BATCH_MQ", 41, body=lock)
        self._ask("UNLOCK_BATCH_MQ", 42, body=lock)
        self._relays()
        goodbye = {"clientID": "127.0.0.1@second", "consumerGroup": GROUP}
        self._ask("UNREGISTER_CLIENT", 35, goodbye)

    def _relays(self) -> None:
        """Requests of an operator that the broker passes on to a consumer."""
        fields = {"consumerGroup": GROUP, "clientId": MEMBER, "jstackEnable": False}
        self._relay("GET_CONSUMER_RUNNING_INFO", 307, fields)
        fields = {"consumerGroup": GROUP, "clientId": MEMBER, "msgId": self._sent.message_id}
        self._relay("CONSUME_MESSAGE_DIRECTLY", 309, fields)

    def _relay(self, name: str, code: int, fields: Mapping[str, object]) -> None:
        self._broker.send_request(code, fields, b"", flag=0)
        self._member.respond(self._receive_request(name, self._member, code))
        while not self._broker.receive_frame()[0]["flag"] & RESPONSE:
            pass
        self.shapes[name] = frame_shape(self._broker.received_frame)

    def _replies(self) -> None:
        properties = {"REPLY_TO_CLIENT": ASKER, "CORRELATION_ID": "c", "UNIQ_KEY": "R1"}
        fields = _send_v1(topic=f"{CLUSTER}_REPLY_TOPIC", properties=encode_properties(properties))
        self._member.send_request(324, fields, b"reply", flag=0)
        self._broker.respond(
            self._receive_request("PUSH_REPLY_MESSAGE_TO_CLIENT", self._broker, 326)
        )
        while not self._member.receive_frame()[0]["flag"] & RESPONSE:
            pass
        self.shapes["SEND_REPLY_MESSAGE"] = frame_shape(self._member.received_frame)
        gone = encode_properties({**properties, "REPLY_TO_CLIENT": "gone"})
        self._ask("SEND_REPLY_MESSAGE, requester gone", 324, {**fields, "properties": gone}, b"r")

    # --- transactions ----------------------------------------------------------------------------

    def _transactions(self) -> None:
        committed = self._half("H1")
        self.shapes["SEND_MESSAGE_V2, half"] = frame_shape(self._broker.received_frame)
        self._broker.end_transaction(committed, 8, topic=TOPIC, group=PRODUCERS)
        self.shapes["END_TRANSACTION, commit"] = frame_shape(self._broker.received_frame)
        self._broker.end_transaction(self._half("H2"), 12, topic=TOPIC, group=PRODUCERS)
        self.shapes["END_TRANSACTION, rollback"] = frame_shape(self._broker.received_frame)
        unchecked = self._half("H3")
        self._receive_request("CHECK_TRANSACTION_STATE", self._broker, 39)
        self._broker.end_transaction(unchecked, 12, topic=TOPIC, group=PRODUCERS)

    def _half(self, key: str) -> SendResult:
        return self._broker.send_half(TOPIC, b"half", {"UNIQ_KEY": key}, group=PRODUCERS)

    # --- operators -------------------------------------------------------------------------------

    def _statistics(self) -> None:
        self._ask("GET_TOPIC_STATS_INFO", 202, {"topic": TOPIC})
        self._ask("GET_CONSUME_STATS", 208, {"consumerGroup": GROUP, "topic": TOPIC})
        self._ask("QUERY_TOPIC_CONSUME_BY_WHO", 300, {"topic": TOPIC})
        self._ask("QUERY_TOPICS_BY_CONSUMER", 343, {"group": GROUP})
        self._ask("QUERY_SUBSCRIPTION_BY_CONSUMER", 345, {"topic": TOPIC, "group": GROUP})
        self._ask("QUERY_CONSUME_TIME_SPAN", 303, {"topic": TOPIC, "group": GROUP})
        self._ask("GET_BROKER_CONSUME_STATS", 317, {"isOrder": False})
        stats = {"statsName": "TOPIC_PUT_NUMS", "statsKey": TOPIC}
        self._ask("VIEW_BROKER_STATS_DATA", 315, stats)
        index = {"topic": TOPIC, "queueId": 0, "index": 0, "count": 2, "consumerGroup": GROUP}
        self._ask("QUERY_CONSUME_QUEUE", 321, index)
        clone = {"srcGroup": GROUP, "destGroup": "copies", "topic": TOPIC, "offline": True}
        self._ask("CLONE_GROUP_OFFSET", 314, clone)
        reset = {"topic": TOPIC, "group": GROUP, "timestamp": 0, "isForce": True}
        self._ask("INVOKE_BROKER_TO_RESET_OFFSET", 222, reset)

    def _broker_itself(self) -> None:
        self._ask("GET_BROKER_RUNTIME_INFO", 28)
        self._ask("GET_BROKER_CONFIG", 26)
        self._ask("UPDATE_BROKER_CONFIG", 25, body=b"fileReservedTime=48\n")
        self._ask("CLEAN_EXPIRED_CONSUMEQUEUE", 306)
        self._ask("DELETE_EXPIRED_COMMITLOG", 329)
        self._ask("CLEAN_UNUSED_TOPIC", 316)

    # --- the name server -------------------------------------------------------------------------

    def _name_server(self) -> None:
        ask = self._ask_namesrv
        ask("GET_ROUTEINFO_BY_TOPIC", 105, {"topic": TOPIC})
        ask("GET_ROUTEINFO_BY_TOPIC, unknown", 105, {"topic": "no-such-topic"})
        ask("GET_BROKER_CLUSTER_INFO", 106)
        ask("GET_ALL_TOPIC_LIST_FROM_NAMESERVER", 206)
        ask("GET_TOPICS_BY_CLUSTER", 224, {"cluster": CLUSTER})
        ask("GET_SYSTEM_TOPIC_LIST_FROM_NS", 304)
        ask("GET_UNIT_TOPIC_LIST", 311)
        ask("GET_HAS_UNIT_SUB_TOPIC_LIST", 312)
        ask("GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST", 313)
        key = {"namespace": "n", "key": "k"}
        ask("GET_KV_CONFIG, none", 101, key)
        ask("PUT_KV_CONFIG", 100, {**key, "value": "v"})
        ask("GET_KV_CONFIG", 101, key)
        ask("GET_KVLIST_BY_NAMESPACE", 219, {"namespace": "n"})
        ask("DELETE_KV_CONFIG", 102, key)
        ask("GET_NAMESRV_CONFIG", 319)
        self._registration()
        ask("WIPE_WRITE_PERM_OF_BROKER", 205, {"brokerName": BROKER})
        ask("ADD_WRITE_PERM_OF_BROKER", 327, {"brokerName": BROKER})
        ask("DELETE_TOPIC_IN_NAMESRV", 216, {"topic": "no-such-topic"})
        if not self._is_old:
            ask("unsupported, name server", 9_999)
            ask("GET_BROKER_MEMBER_GROUP", 901, {"clusterName": CLUSTER, "brokerName": BROKER})

    def _registration(self) -> None:
        ask, address = self._ask_namesrv, "127.0.0.1:1"
        identity: dict[str, object] = {
            "brokerName": "broker-b",
            "brokerAddr": address,
            "clusterName": CLUSTER,
            "brokerId": 0,
        }
        version = {"counter": 1, "stateVersion": 0, "timestamp": 1}
        topic = {"topicName": "t", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6}
        tables = {
            "dataVersion": version,
            "topicConfigTable": {"t": topic, "u": {**topic, "topicName": "u"}},
        }
        body = _json({"topicConfigSerializeWrapper": tables, "filterServerList": []})
        register = {**identity, "haServerAddr": "127.0.0.1:2", "compressed": False, "bodyCrc32": 0}
        ask("REGISTER_BROKER", 103, register, body)
        ask("QUERY_DATA_VERSION", 322, identity, _json(version))
        if not self._is_old:
            ask("BROKER_HEARTBEAT", 904, identity)
        ask("UNREGISTER_BROKER", 104, identity)

    def _deletions(self) -> None:
        self._ask("DELETE_SUBSCRIPTIONGROUP", 207, {"groupName": "copies", "cleanOffset": True})
        self._ask("DELETE_TOPIC_IN_BROKER", 215, {"topic": TOPIC})


# --- requests ------------------------------------------------------------------------------------


def _send_v1(**changes: object) -> dict[str, object]:
    fields: dict[str, object] = {
        "producerGroup": PRODUCERS,
        "topic": TOPIC,
        "defaultTopic": "TBW102",
        "defaultTopicQueueNums": 4,
        "queueId": 0,
        "sysFlag": 0,
        "bornTimestamp": _now_ms(),
        "flag": 0,
        "properties": encode_properties({"UNIQ_KEY": "U0"}),
        "reconsumeTimes": 0,
        "unitMode": False,
        "batch": False,
    }
    return {**fields, **changes}


def _batch(*bodies: bytes, delay: str = "") -> bytes:
    encoded = b""
    for number, body in enumerate(bodies):
        properties = {"UNIQ_KEY": f"B{number}", **({"DELAY": delay} if delay else {})}
        text = encode_properties(properties).encode()
        size = 22 + len(body) + len(text)
        encoded += struct.pack(">iiiii", size, 0, 0, 0, len(body)) + body
        encoded += struct.pack(">h", len(text)) + text
    return encoded


def _producer_heartbeat(client_id: str) -> bytes:
    producers = [{"groupName": PRODUCERS}]
    return _json({"clientID": client_id, "producerDataSet": producers, "consumerDataSet": []})


def _heartbeat(client_id: str) -> bytes:
    subscription = {"topic": TOPIC, "subString": "*", "subVersion": 1, "expressionType": "TAG"}
    consumer = {
        "groupName": GROUP,
        "consumeType": "CONSUME_PASSIVELY",
        "messageModel": "CLUSTERING",
        "consumeFromWhere": "CONSUME_FROM_LAST_OFFSET",
        "subscriptionDataSet": [subscription],
        "unitMode": False,
    }
    body = {"clientID": client_id, "producerDataSet": [], "consumerDataSet": [consumer]}
    return _json(body)


def _queue(queue_id: int) -> dict[str, object]:
    return {"topic": TOPIC, "brokerName": BROKER, "queueId": queue_id}


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


# --- captured shapes -----------------------------------------------------------------------------


def capture(version: str, directory: Path) -> dict[str, Shape]:
    """Return the shapes of Apache RocketMQ, which is started for it."""
    with ApacheRocketMQ(version, directory, SETTINGS) as rocketmq:
        is_old = version.startswith("4.")
        return Conversation(rocketmq.address, rocketmq.namesrv_address, is_old=is_old).run()


def write_fixture(version: str, shapes: Mapping[str, Shape]) -> None:
    """Write the shapes with one response a line, so that a difference can be read."""
    origin = {"rocketmq": version, "captured": time.strftime("%Y-%m-%d")}
    lines = [f'"origin": {json.dumps(origin)}']
    lines += [f"{json.dumps(name)}: {json.dumps(shape)}" for name, shape in shapes.items()]
    (FIXTURES / version / "shapes.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    for release in sys.argv[1:] or VERSIONS:
        with tempfile.TemporaryDirectory(prefix=f"rocketmq-{release}-") as scratch:
            write_fixture(release, capture(release, Path(scratch)))
