"""System topics and groups are closed to clients, on every request that can name one.

Each handler has an entry in CHANGES or in READS. An entry of CHANGES sends the request for a topic
and a group; whatever the response is, nothing of the broker may have changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

import pytest

from escrowmq.message import names
from escrowmq.message.keys import encode_offset_id
from escrowmq.message.names import CLOSED_TOPICS, retry_topic
from escrowmq.message.record import NewRecord
from escrowmq.remoting.bodies import HalfPositions, encode_body
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.headers import (
    ConsumeMessageDirectly,
    ConsumerSendMessageBack,
    DecideBatch,
    EndTransaction,
    EndTransactions,
    NoFields,
    PullMessage,
    RegisterWriter,
    SendMessage,
    SendMessageV2,
    UnregisterClient,
    UpdateConsumerOffset,
    WriterHeader,
)
from escrowmq.remoting.headers_admin import (
    CloneGroupOffset,
    CreateTopic,
    DeleteGroup,
    GroupHeader,
    ResetOffset,
    TopicHeader,
)
from escrowmq.remoting.requests import Request
from tests.interop.remoting import Response
from tests.support.broker_requests import FakeChannel, new_request
from tests.support.escrows import CURSOR_GROUP, EscrowBench
from tests.support.stores import HOST, NOW_MS

CODE: Final = RequestCode
SYSTEM_GROUPS: Final = (CURSOR_GROUP, "CID_RMQ_SYS_REVIVE_GROUP", "CID_SYS_RMQ_TRANS")
SYSTEM_TOPICS: Final = (
    *sorted(CLOSED_TOPICS),
    retry_topic(CURSOR_GROUP),
    names.dlq_topic(CURSOR_GROUP),
)
OWNED_TOPICS: Final = (  # clients may use these, but not create, change or delete them
    names.STRANDED_TOPIC,
    names.SELF_TEST_TOPIC,
    names.OFFSET_MOVED_TOPIC,
    names.TEMPLATE_TOPIC,
    names.BENCHMARK_TOPIC,
    "C",  # the cluster
    "broker-a",
    "C_REPLY_TOPIC",
)
COMMIT_FLAG: Final = 1


def send(code: RequestCode, topic: str, group: str, **changes: Any) -> Request[Any]:
    header = SendMessage if code in (CODE.SEND_MESSAGE, CODE.SEND_REPLY_MESSAGE) else SendMessageV2
    fields = {"producer_group": group, "topic": topic, "default_topic": "TBW102", "queue_id": 0}
    text = "UNIQ_KEY\x01forged\x02REPLY_TO_CLIENT\x01c\x02"
    return new_request(code, header(**{**fields, "properties": text, **changes}), b"forged")


def pull(code: RequestCode, topic: str, group: str) -> Request[Any]:
    return new_request(
        code,
        PullMessage(
            consumer_group=group,
            topic=topic,
            queue_id=0,
            queue_offset=0,
            max_msg_nums=1,
            sys_flag=COMMIT_FLAG | 4,
            commit_offset=20,
            subscription="*",
        ),
    )


def heartbeat(topic: str, group: str) -> Request[Any]:
    subscription = {"topic": topic, "subString": "*", "subVersion": 1}
    consumer = {"groupName": group, "subscriptionDataSet": [subscription]}
    producer = {"groupName": group}
    body = {"clientID": "c", "producerDataSet": [producer], "consumerDataSet": [consumer]}
    return new_request(CODE.HEART_BEAT, NoFields(), json.dumps(body).encode())


def lock(code: RequestCode, topic: str, group: str) -> Request[Any]:
    queue = {"topic": topic, "brokerName": "broker-a", "queueId": 0}
    body = {"consumerGroup": group, "clientId": "c", "mqSet": [queue]}
    return new_request(code, NoFields(), json.dumps(body).encode())


def create_topic(topic: str) -> Request[Any]:
    fields = CreateTopic(topic=topic, read_queue_nums=7, write_queue_nums=7, perm=4)
    return new_request(CODE.UPDATE_AND_CREATE_TOPIC, fields)


def reset(topic: str, group: str, **changes: Any) -> Request[Any]:
    fields = {"topic": topic, "group": group, "timestamp": -1, "is_force": True}
    return new_request(CODE.INVOKE_BROKER_TO_RESET_OFFSET, ResetOffset(**{**fields, **changes}))


MakeRequests = Callable[[str, str], list[Request[Any]]]
# Requests that change something, for a topic and a group.
CHANGES: Final[dict[RequestCode, MakeRequests]] = {
    CODE.SEND_MESSAGE: lambda t, g: [
        send(CODE.SEND_MESSAGE, t, g),
        send(CODE.SEND_MESSAGE, t, g, sys_flag=8),
        send(CODE.SEND_MESSAGE, t, g, queue_id=-1),
    ],
    CODE.SEND_MESSAGE_V2: lambda t, g: [
        send(CODE.SEND_MESSAGE_V2, t, g),
        send(CODE.SEND_MESSAGE_V2, t, g, properties="TRAN_MSG\x01true\x02PGROUP\x01p\x02"),
        send(CODE.SEND_MESSAGE_V2, t, g, properties="DELAY\x011\x02"),
    ],
    CODE.SEND_BATCH_MESSAGE: lambda t, g: [send(CODE.SEND_BATCH_MESSAGE, t, g, batch=True)],
    CODE.SEND_REPLY_MESSAGE: lambda t, g: [send(CODE.SEND_REPLY_MESSAGE, t, g)],
    CODE.SEND_REPLY_MESSAGE_V2: lambda t, g: [send(CODE.SEND_REPLY_MESSAGE_V2, t, g)],
    CODE.CONSUMER_SEND_MSG_BACK: lambda t, g: [
        new_request(
            CODE.CONSUMER_SEND_MSG_BACK,
            ConsumerSendMessageBack(offset=0, group=group, delay_level=level, origin_topic=t),
        )
        for level in (-1, 0, 1)
        for group in (g, "ordinary")  # the record at offset 0 is a half
    ],
    CODE.PULL_MESSAGE: lambda t, g: [pull(CODE.PULL_MESSAGE, t, g)],
    CODE.LITE_PULL_MESSAGE: lambda t, g: [pull(CODE.LITE_PULL_MESSAGE, t, g)],
    CODE.UPDATE_CONSUMER_OFFSET: lambda t, g: [
        new_request(
            CODE.UPDATE_CONSUMER_OFFSET,
            UpdateConsumerOffset(consumer_group=g, topic=t, queue_id=0, commit_offset=offset),
        )
        for offset in (0, 20, 1 << 62)
    ],
    CODE.INVOKE_BROKER_TO_RESET_OFFSET: lambda t, g: [
        reset(t, g),
        reset(t, g, timestamp=0),
        reset(t, g, queue_id=0, offset=1),
    ],
    CODE.CLONE_GROUP_OFFSET: lambda t, g: [
        new_request(CODE.CLONE_GROUP_OFFSET, CloneGroupOffset(src_group=s, dest_group=d, topic=x))
        for s, d in (("ordinary", g), (g, "ordinary"), (g, "new-group"))
        for x in (t, None)
    ],
    CODE.HEART_BEAT: lambda t, g: [heartbeat(t, g)],
    CODE.UNREGISTER_CLIENT: lambda t, g: [
        new_request(
            CODE.UNREGISTER_CLIENT,
            UnregisterClient(client_id="c", producer_group=g, consumer_group=g),
        )
    ],
    CODE.LOCK_BATCH_MQ: lambda t, g: [lock(CODE.LOCK_BATCH_MQ, t, g)],
    CODE.UNLOCK_BATCH_MQ: lambda t, g: [lock(CODE.UNLOCK_BATCH_MQ, t, g)],
    CODE.UPDATE_AND_CREATE_TOPIC: lambda t, g: [create_topic(t)],
    CODE.DELETE_TOPIC_IN_BROKER: lambda t, g: [
        new_request(CODE.DELETE_TOPIC_IN_BROKER, TopicHeader(topic=t))
    ],
    CODE.CLEAN_UNUSED_TOPIC: lambda t, g: [new_request(CODE.CLEAN_UNUSED_TOPIC, NoFields())],
    CODE.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: lambda t, g: [
        new_request(
            CODE.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
            NoFields(),
            json.dumps({"groupName": g, "consumeEnable": False, "retryQueueNums": 9}).encode(),
        )
    ],
    CODE.DELETE_SUBSCRIPTIONGROUP: lambda t, g: [
        new_request(
            CODE.DELETE_SUBSCRIPTIONGROUP,
            DeleteGroup(group_name=g, clean_offset=True, remove_offset=True),
        )
    ],
    CODE.GET_SUBSCRIPTIONGROUP_CONFIG: lambda t, g: [  # creates a group that does not exist
        new_request(CODE.GET_SUBSCRIPTIONGROUP_CONFIG, GroupHeader(group=g))
    ],
    CODE.CONSUME_MESSAGE_DIRECTLY: lambda t, g: [
        new_request(
            CODE.CONSUME_MESSAGE_DIRECTLY,
            ConsumeMessageDirectly(
                consumer_group="ordinary",
                client_id="consumer",
                msg_id=encode_offset_id(HOST, 0),
                topic=t,
            ),
        )
    ],
    # These name halves by their positions, or writers; a topic or a group in them is only a claim.
    CODE.END_TRANSACTION: lambda t, g: [
        new_request(
            CODE.END_TRANSACTION,
            EndTransaction(
                topic=t,
                producer_group=g,
                tran_state_table_offset=0,
                commit_log_offset=0,
                commit_or_rollback=12,
            ),
        )
    ],
    CODE.END_TRANSACTIONS: lambda t, g: [
        new_request(
            CODE.END_TRANSACTIONS,
            EndTransactions(producer_group=g, commit_or_rollback=12),
            encode_body(HalfPositions(halves=[(0, 0)])),
        )
    ],
}
# Requests that only read, and those that name neither a topic nor a group.
READS: Final = frozenset(
    (
        CODE.QUERY_CONSUMER_OFFSET,
        CODE.GET_MAX_OFFSET,
        CODE.GET_MIN_OFFSET,
        CODE.SEARCH_OFFSET_BY_TIMESTAMP,
        CODE.GET_EARLIEST_MSG_STORETIME,
        CODE.QUERY_MESSAGE,
        CODE.VIEW_MESSAGE_BY_ID,
        CODE.CHECK_CLIENT_CONFIG,
        CODE.GET_CONSUMER_LIST_BY_GROUP,
        CODE.GET_TOPIC_CONFIG,
        CODE.GET_ALL_TOPIC_CONFIG,
        CODE.GET_SYSTEM_TOPIC_LIST_FROM_BROKER,
        CODE.GET_ALL_SUBSCRIPTIONGROUP_CONFIG,
        CODE.GET_CONSUMER_CONNECTION_LIST,
        CODE.GET_PRODUCER_CONNECTION_LIST,
        CODE.GET_ALL_PRODUCER_INFO,
        CODE.QUERY_TOPIC_CONSUME_BY_WHO,
        CODE.QUERY_TOPICS_BY_CONSUMER,
        CODE.QUERY_SUBSCRIPTION_BY_CONSUMER,
        CODE.GET_TOPIC_STATS_INFO,
        CODE.GET_CONSUME_STATS,
        CODE.GET_BROKER_CONSUME_STATS,
        CODE.QUERY_CONSUME_TIME_SPAN,
        CODE.QUERY_CONSUME_QUEUE,
        CODE.GET_CONSUMER_RUNNING_INFO,
        CODE.GET_BROKER_RUNTIME_INFO,
        CODE.VIEW_BROKER_STATS_DATA,
        CODE.LIST_TRANSACTIONS,
        CODE.SHOW_TRANSACTION,
        CODE.TRANSACTION_CURSORS,
        CODE.GET_BROKER_CONFIG,
        CODE.AUTH_GET_USER,
        CODE.AUTH_LIST_USER,
        CODE.AUTH_GET_ACL,
        CODE.AUTH_LIST_ACL,
        # Administration that names neither a topic nor a consumer group.
        CODE.UPDATE_BROKER_CONFIG,
        CODE.CLEAN_EXPIRED_CONSUMEQUEUE,
        CODE.DELETE_EXPIRED_COMMITLOG,
        CODE.PREPARE_BACKUP,
        CODE.SETTLE_TRANSACTION,
        CODE.RESUME_TRANSACTION,
        CODE.RESUME_CHECK_HALF_MESSAGE,
        CODE.REGISTER_WRITER,
        CODE.DECIDE_BATCH,
        CODE.QUERY_WRITER,
        # Refused always.
        CODE.AUTH_CREATE_USER,
        CODE.AUTH_UPDATE_USER,
        CODE.AUTH_DELETE_USER,
        CODE.AUTH_CREATE_ACL,
        CODE.AUTH_UPDATE_ACL,
        CODE.AUTH_DELETE_ACL,
    )
)
HALVES: Final = 3


@pytest.fixture(scope="module")
def bench() -> EscrowBench:
    """Return a broker with open halves, a group with offsets, and every kind of system record."""
    bench = EscrowBench()
    for number in range(HALVES):
        bench.park(f"k{number}", DELAY="1" if number == 2 else "")
    for topic in (*CLOSED_TOPICS, "T"):
        bench.store.append([NewRecord(topic, 0, b"x", b"TAGS\x01x\x02")], now_ms=NOW_MS)
        bench.broker.offsets.commit(topic, "ordinary", 0, 1)
    consumer = FakeChannel("127.0.0.1:40002")
    bench.turn(heartbeat("T", "ordinary"), channel=consumer)
    bench.broker.offsets.commit("T", CURSOR_GROUP, 0, 1)
    for _ in range(2):
        bench.store.flush()
        bench.tick()
    return bench


def broker_state(bench: EscrowBench) -> dict[str, object]:
    """Return everything that a request could have changed."""
    broker = bench.broker
    return {
        "log": bench.store.end,
        "topics": broker.topics.configs(),
        "groups": broker.groups.configs(),
        "offsets": broker.offsets.dump(),
        "consumers": sorted(broker.consumers.names()),
        "queues": sorted(bench.store.queues()),
        "open halves": [half.queue_offset for half in bench.coordinator.halves],
        "sendable": dict(broker.topics.sendable_queue_counts),
        # Private, because no request shows the locks.
        "locks": [broker._locks.group_has_locks(group, now_ms=NOW_MS) for group in SYSTEM_GROUPS],
    }


def assert_closed(bench: EscrowBench, code: RequestCode, topic: str, group: str) -> None:
    for request in CHANGES[code](topic, group):
        before = broker_state(bench)
        bench.turn(request)
        responses: list[Response] = bench.channel.responses()
        assert [response.code for response in responses] != [ResponseCode.SYSTEM_ERROR] or (
            "internal error" not in responses[0].remark
        )
        assert broker_state(bench) == before, (request.head.fields, request.body)


def test_every_handler_is_in_a_table(bench: EscrowBench) -> None:
    """A new request needs an entry: does it change something that a topic or a group names?"""
    codes = {handler.code for handler in bench.broker.handlers()}
    assert codes == {*CHANGES, *READS}
    assert not CHANGES.keys() & READS


@pytest.mark.parametrize("code", CHANGES)
def test_a_system_topic_is_closed(bench: EscrowBench, code: RequestCode) -> None:
    if code in (CODE.HEART_BEAT, CODE.LOCK_BATCH_MQ, CODE.UNLOCK_BATCH_MQ):
        return  # an ordinary group may read a system topic, and share its queues
    for topic in SYSTEM_TOPICS:
        group = "ordinary"
        if code in (
            CODE.UNREGISTER_CLIENT,
            CODE.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
            CODE.DELETE_SUBSCRIPTIONGROUP,
            CODE.GET_SUBSCRIPTIONGROUP_CONFIG,
            CODE.CLONE_GROUP_OFFSET,
        ):
            group = CURSOR_GROUP  # these concern the group, whatever topic they name
        assert_closed(bench, code, topic, group)


@pytest.mark.parametrize("code", CHANGES)
@pytest.mark.parametrize("group", SYSTEM_GROUPS)
def test_a_system_group_is_closed(bench: EscrowBench, group: str, code: RequestCode) -> None:
    has_topic_only = code.name.startswith("SEND_") or code in (
        CODE.UPDATE_AND_CREATE_TOPIC,
        CODE.DELETE_TOPIC_IN_BROKER,
    )
    topic = retry_topic(group) if has_topic_only else "T"
    assert_closed(bench, code, topic, group)
    assert_closed(bench, code, names.HALF_TOPIC, group)


@pytest.mark.parametrize("code", [CODE.UPDATE_AND_CREATE_TOPIC, CODE.DELETE_TOPIC_IN_BROKER])
@pytest.mark.parametrize("topic", [*OWNED_TOPICS, names.TRACE_TOPIC])
def test_a_topic_of_the_broker_is_neither_changed_nor_deleted(
    bench: EscrowBench, topic: str, code: RequestCode
) -> None:
    bench.broker.topics.ensure(topic, queue_count=1, now_ms=NOW_MS)
    if topic == names.TRACE_TOPIC and not bench.broker.topics.is_system(topic):
        return  # an ordinary topic unless the broker provides it
    assert_closed(bench, code, topic, "ordinary")


def test_what_clients_need_stays_open() -> None:
    bench = EscrowBench()
    writable = (
        names.TRACE_TOPIC,
        names.BENCHMARK_TOPIC,
        names.TEMPLATE_TOPIC,
        "rmq_sys_TRACE_DATA_x",
    )
    for topic in writable:
        response = bench.request(send(CODE.SEND_MESSAGE_V2, topic, "p"))
        assert response.code == 0, (topic, response.remark)
    assert bench.request(heartbeat("T", "watchers"), FakeChannel("127.0.0.1:40003")).code == 0
    for topic in (names.STRANDED_TOPIC, names.OFFSET_MOVED_TOPIC, names.SELF_TEST_TOPIC):
        [commit, *_] = CHANGES[CODE.UPDATE_CONSUMER_OFFSET](topic, "watchers")
        assert bench.request(commit).code == 0, topic
        assert bench.broker.offsets.query(topic, "watchers", 0) == 0
    for topic in (*CLOSED_TOPICS, names.STRANDED_TOPIC):
        reading = pull(CODE.PULL_MESSAGE, topic, names.TOOLS_CONSUMER_GROUP)
        fields = reading.head.fields
        without_commit = new_request(
            CODE.PULL_MESSAGE,
            PullMessage(
                consumer_group=fields.consumer_group,
                topic=topic,
                queue_id=0,
                queue_offset=0,
                max_msg_nums=1,
                sys_flag=4,
                subscription="*",
            ),
        )
        assert bench.request(without_commit).code in (
            ResponseCode.SUCCESS,
            ResponseCode.PULL_NOT_FOUND,
            ResponseCode.PULL_OFFSET_MOVED,
        )


def test_writers_are_no_groups() -> None:
    bench = EscrowBench()
    for fields, code in (
        (RegisterWriter(writer=CURSOR_GROUP), CODE.REGISTER_WRITER),
        (WriterHeader(writer=CURSOR_GROUP), CODE.QUERY_WRITER),
    ):
        assert bench.request(new_request(code, fields)).code == 0
    decide = DecideBatch(writer=CURSOR_GROUP, batch=0, fence=1)
    request = new_request(CODE.DECIDE_BATCH, decide, b'{"winners":[]}')
    assert bench.request(request).code == 0
    assert bench.broker.offsets.query(names.HALF_TOPIC, CURSOR_GROUP, 0) is None
