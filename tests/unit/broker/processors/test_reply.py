"""Replies to request messages: pushed to the requester, stored, and answered by its response."""

from __future__ import annotations

from typing import Any

import pytest

from escrowmq.broker.broker import Broker
from escrowmq.broker.dispatch import Channel
from escrowmq.config import BrokerConfig, Config
from escrowmq.consume.members import GroupClient
from escrowmq.message.keys import UniqueKeyGenerator
from escrowmq.message.names import reply_topic
from escrowmq.remoting.codes import FLAG_ONEWAY, RequestCode
from escrowmq.remoting.command import Command
from escrowmq.remoting.headers import SendMessage
from escrowmq.testing.disks import MemoryDisk
from tests.interop.remoting import Response
from tests.support.broker_requests import AskedChannel, FakeChannel, ask, bodies
from tests.support.stores import HOST, NOW_MS, TINY, open_store

TOPIC = reply_topic("DefaultCluster")
ACCEPTED, REFUSED = Command(code=0, opaque=1), Command(code=1, opaque=1)


class Bench:
    def __init__(self, *, stores_replies: bool = True) -> None:
        disk = MemoryDisk()
        self.store = open_store(disk)
        config = Config(store=TINY, broker=BrokerConfig(stores_replies=stores_replies))
        keys = UniqueKeyGenerator(address="127.0.0.1", process_id=1, salt=2)
        self.broker = Broker(disk, self.store, config, keys, store_host=HOST)
        self.replier, self.requester = FakeChannel(), AskedChannel("127.0.0.1:40001")
        client: GroupClient[Channel] = GroupClient(client_id="asker", channel=self.requester)
        self.broker.producers.heartbeat("p", client, now_ms=NOW_MS)

    def reply(self, properties: str = "REPLY_TO_CLIENT\x01asker\x02", flag: int = 0) -> None:
        header = SendMessage(producer_group="p", topic=TOPIC, queue_id=0, properties=properties)
        request = ask(RequestCode.SEND_REPLY_MESSAGE, header, b"the reply", flag=flag)
        self.broker.handle(self.replier, request, NOW_MS)
        self.broker.end_turn(NOW_MS)

    def requester_responds(self, command: Command | None) -> list[Response]:
        [(code, _, body, on_response)] = self.requester.asked
        assert (code, body) == (RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, b"the reply")
        on_response(command, b"")
        return self.replier.answers()


@pytest.mark.parametrize(
    ("stores_replies", "stored_bodies"), [(True, [b"the reply"]), (False, [])], ids=str
)
def test_a_reply_is_answered_when_the_requester_has_accepted_it(
    stores_replies: bool, stored_bodies: list[bytes]
) -> None:
    bench = Bench(stores_replies=stores_replies)
    bench.reply()
    assert bench.replier.answers() == []
    [answer] = bench.requester_responds(ACCEPTED)
    assert answer.code == 0
    assert (answer.ext_fields["msgId"] == "0") is not stores_replies
    assert (answer.ext_fields["queueId"], answer.ext_fields["queueOffset"]) == ("0", "0")
    assert bodies(bench.store, TOPIC) == stored_bodies


@pytest.mark.parametrize(
    ("response", "remark"),
    [
        (REFUSED, "the requester did not accept the reply"),
        (None, "the requester did not respond to the reply"),
    ],
)
def test_a_reply_that_the_requester_does_not_accept_is_an_error(response: Any, remark: str) -> None:
    bench = Bench()
    bench.reply()
    [answer] = bench.requester_responds(response)
    assert (answer.code, answer.remark) == (1, remark)


def test_a_reply_to_a_closed_connection_is_an_error_and_stored() -> None:
    bench = Bench()
    bench.requester.is_open = False
    bench.reply()
    answer = bench.replier.answer()
    assert answer.code == 1
    assert answer.remark == "the requester asker is not connected to this broker"
    assert bodies(bench.store, TOPIC) == [b"the reply"]


def test_a_reply_that_names_no_requester_is_an_error() -> None:
    bench = Bench()
    bench.reply(properties="")
    answer = bench.replier.answer()
    assert (answer.code, answer.remark) == (1, "the reply has no property REPLY_TO_CLIENT")


def test_a_one_way_reply_gets_no_response() -> None:
    bench = Bench()
    bench.reply(flag=FLAG_ONEWAY)
    assert bench.requester_responds(ACCEPTED) == []


def test_a_stored_reply_counts_as_a_message_of_its_topic() -> None:
    bench = Bench()
    bench.reply()
    assert bench.broker.counters.messages_in[TOPIC, "normal"].count == 1
