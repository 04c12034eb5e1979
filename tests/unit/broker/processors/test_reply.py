"""Replies to request messages: they are pushed to the requester and stored."""

from __future__ import annotations

from typing import Any

import pytest

from escrowmq.broker.dispatch import Channel
from escrowmq.config import BrokerConfig, Config
from escrowmq.consume.members import GroupClient
from escrowmq.message.names import reply_topic
from escrowmq.remoting.codes import FLAG_ONEWAY, RequestCode
from escrowmq.remoting.command import Command
from escrowmq.remoting.headers import SendMessage
from tests.interop.remoting import Response
from tests.support.broker_bench import BrokerBench
from tests.support.broker_requests import CallableChannel, bodies, new_request
from tests.support.stores import NOW_MS, TINY

TOPIC = reply_topic("DefaultCluster")
ACCEPTED, REFUSED = Command(code=0, opaque=1), Command(code=1, opaque=1)


class Bench(BrokerBench):
    """A broker, a client that replies, and the connected client that sent the request."""

    def __init__(self, *, stores_replies: bool = True) -> None:
        broker = BrokerConfig(stores_replies=stores_replies)
        super().__init__(config=Config(store=TINY, broker=broker))
        self.requester = CallableChannel("127.0.0.1:40001")
        client: GroupClient[Channel] = GroupClient(client_id="requester", channel=self.requester)
        self.broker.producers.heartbeat("p", client, now_ms=NOW_MS)

    def reply(
        self, properties: str = "REPLY_TO_CLIENT\x01requester\x02", flag: int = 0
    ) -> list[Response]:
        """Send a reply and return the responses to the client that replies."""
        header = SendMessage(producer_group="p", topic=TOPIC, queue_id=0, properties=properties)
        return self.turn(
            new_request(RequestCode.SEND_REPLY_MESSAGE, header, b"the reply", flag=flag)
        )

    def requester_responds(self, command: Command | None) -> list[Response]:
        """Let the requester respond to the push, or not at all if `command` is None.

        Return the responses to the client that replied.
        """
        [(code, _, body, on_response)] = self.requester.calls
        assert (code, body) == (RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, b"the reply")
        on_response(command, b"")
        return self.channel.responses()


@pytest.mark.parametrize(
    ("stores_replies", "stored_bodies"), [(True, [b"the reply"]), (False, [])], ids=str
)
def test_a_reply_gets_its_response_when_the_requester_has_accepted_it(
    stores_replies: bool, stored_bodies: list[bytes]
) -> None:
    bench = Bench(stores_replies=stores_replies)
    assert bench.reply() == []
    [response] = bench.requester_responds(ACCEPTED)
    assert response.code == 0
    assert (response.ext_fields["msgId"] == "0") is not stores_replies
    assert (response.ext_fields["queueId"], response.ext_fields["queueOffset"]) == ("0", "0")
    assert bodies(bench.store, TOPIC) == stored_bodies


@pytest.mark.parametrize(
    ("push_response", "remark"),
    [
        (REFUSED, "the requester did not accept the reply"),
        (None, "the requester did not respond to the reply"),
    ],
)
def test_a_reply_that_the_requester_does_not_accept_is_an_error(
    push_response: Any, remark: str
) -> None:
    bench = Bench()
    bench.reply()
    [response] = bench.requester_responds(push_response)
    assert (response.code, response.remark) == (1, remark)


def test_a_reply_to_a_closed_connection_is_an_error_and_stored() -> None:
    bench = Bench()
    bench.requester.is_open = False
    [response] = bench.reply()
    assert response.code == 1
    assert response.remark == "the requester requester is not connected to this broker"
    assert bodies(bench.store, TOPIC) == [b"the reply"]


def test_a_reply_that_names_no_requester_is_an_error() -> None:
    bench = Bench()
    [response] = bench.reply(properties="")
    assert (response.code, response.remark) == (1, "the reply has no property REPLY_TO_CLIENT")


def test_a_one_way_reply_gets_no_response() -> None:
    bench = Bench()
    bench.reply(flag=FLAG_ONEWAY)
    assert bench.requester_responds(ACCEPTED) == []


def test_a_stored_reply_counts_as_a_message_of_its_topic() -> None:
    bench = Bench()
    bench.reply()
    assert bench.broker.counters.messages_in[TOPIC, "normal"].count == 1
