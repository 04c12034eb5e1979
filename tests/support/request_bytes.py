"""The bytes of requests as real clients write them, and in forms that few or none write."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

from escrowmq.remoting.codes import FLAG_ONEWAY, JSON, ROCKETMQ
from escrowmq.remoting.command import Command, encode_command
from escrowmq.remoting.frame import encode_frame

SEND_V2, SEND, END = 310, 10, 37
COMMIT, ROLLBACK, UNKNOWN = 8, 12, 0
NEGATIVE_TAG = "polygenelubricants"  # its hash is negative


def request_bytes(
    code: int,
    fields: dict[str, str],
    *,
    opaque: int,
    flag: int = 0,
    body: bytes = b"",
    **head: Any,
) -> bytes:
    """Return a request as the Java client writes it."""
    header = {
        "code": code,
        "extFields": fields,
        "flag": flag,
        "language": "JAVA",
        "opaque": opaque,
        "serializeTypeCurrentRPC": "JSON",
        "version": 401,
        **head,
    }
    return encode_frame(JSON, json.dumps(header, separators=(",", ":")).encode(), body)


def message_properties(**values: str) -> str:
    return "".join(f"{name}\x01{value}\x02" for name, value in values.items())


def send_fields(topic: str = "T", queue_id: int = 0, **changes: str) -> dict[str, str]:
    fields = {
        "a": "producers",
        "b": topic,
        "c": "TBW102",
        "d": "8",
        "e": str(queue_id),
        "f": "0",
        "g": "1700000000123",
        "h": "0",
        "i": "",
        "j": "0",
        "k": "false",
        "m": "false",
    }
    return {**fields, **changes}


def end_fields(
    group: str, queue_offset: int, log_offset: int, verdict: int, **changes: str
) -> dict[str, str]:
    fields = {
        "producerGroup": group,
        "tranStateTableOffset": str(queue_offset),
        "commitLogOffset": str(log_offset),
        "commitOrRollback": str(verdict),
        "fromTransactionCheck": "false",
        "msgId": "7F0000010001",
        "transactionId": "7F0000010001",
    }
    return {**fields, **changes}


class RequestGenerator:
    """Makes requests at random: most of them plain, some of them odd.

    `sign` gets the fields and the body of each, and returns the fields to send.
    """

    def __init__(
        self,
        random: Random,
        sign: Callable[[dict[str, str], bytes], dict[str, str]] = lambda fields, body: fields,
    ) -> None:
        self._random = random
        self._sign = sign
        self._opaque = 0
        self._key = 0
        self.keys: list[str] = []  # that were used, for repeated sends
        # Group, queue offset and log offset of halves: those whose end is a plain request, others,
        # and those that were ended.
        self.plain_halves: list[tuple[str, int, int]] = []
        self.open_halves: list[tuple[str, int, int]] = []
        self.ended_halves: list[tuple[str, int, int]] = []
        self.ended_in_turn: list[tuple[str, int, int]] = []

    def opaque(self) -> int:
        self._opaque += 1
        return self._opaque

    def request(
        self, code: int, fields: dict[str, str], *, opaque: int, body: bytes = b"", **head: Any
    ) -> bytes:
        return request_bytes(code, self._sign(fields, body), opaque=opaque, body=body, **head)

    # --- plain requests --------------------------------------------------------------------------

    def plain(self) -> bytes:
        random = self._random
        kind = random.random()
        if kind < 0.3 and self.plain_halves:
            return self.end(self.plain_halves.pop(random.randrange(len(self.plain_halves))))
        return self.half() if kind < 0.7 else self.send()

    def end_any(self) -> bytes:
        """End a half that the native path may not know."""
        if not self.open_halves:
            return self.plain()
        return self.end(self.open_halves.pop(self._random.randrange(len(self.open_halves))))

    def end_turn(self) -> None:
        self.ended_halves += self.ended_in_turn
        self.ended_in_turn.clear()

    def forget_plain(self) -> None:
        """No end is plain any more: the broker was started again."""
        self.open_halves += self.plain_halves
        self.plain_halves.clear()

    def properties(self) -> dict[str, str]:
        random = self._random
        self._key += 1
        values = {"UNIQ_KEY": f"7F00000100{self._key:06X}"}
        self.keys.append(values["UNIQ_KEY"])
        if random.random() < 0.5:
            values["TAGS"] = random.choice(["paid", "TagA", "x", NEGATIVE_TAG])
        if random.random() < 0.4:
            values["KEYS"] = random.choice(["k1", "k1 k2", "order-77", " lead", "k1  k3 "])
        if random.random() < 0.4:
            values["WAIT"] = "true"
        if random.random() < 0.3:
            values[random.choice(["color", "a", "INSTANCE_ID", "WAITING"])] = 'blue /\\" \u007e'
        items = list(values.items())
        random.shuffle(items)
        return dict(items)

    def body(self) -> bytes:
        return self._random.randbytes(self._random.choice([0, 1, 10, 100, 1024, 3000]))

    def send(self, properties: str | None = None, **changes: str) -> bytes:
        random = self._random
        text = message_properties(**self.properties()) if properties is None else properties
        if properties is None and random.random() < 0.3:
            text = text[:-1]  # some clients write no separator at the end
        fields = send_fields(random.choice(["T", "orders"]), random.randrange(2), i=text)
        if random.random() < 0.2:
            fields |= {"h": "17", "j": "3", "f": random.choice(["1", "2", "259"]), "n": "broker-a"}
        flag = FLAG_ONEWAY if random.random() < 0.1 else 0
        return self.request(
            SEND_V2, {**fields, **changes}, opaque=self.opaque(), flag=flag, body=self.body()
        )

    def half(self, **changes: str) -> bytes:
        random = self._random
        group = random.choice(["producers", "bank"])
        items = [*self.properties().items(), ("PGROUP", group)]
        items.insert(random.randrange(len(items)), ("TRAN_MSG", "true"))
        text = message_properties(**dict(items))
        fields = send_fields(random.choice(["T", "orders"]), random.randrange(2), i=text, f="4")
        return self.request(SEND_V2, {**fields, **changes}, opaque=self.opaque(), body=self.body())

    def end(self, half: tuple[str, int, int], **changes: str) -> bytes:
        random = self._random
        self.ended_in_turn.append(half)
        verdict = COMMIT if random.random() < 0.7 else ROLLBACK
        flag = FLAG_ONEWAY if random.random() < 0.5 else 0
        head: dict[str, Any] = {}
        if verdict == COMMIT:
            head["remark"] = random.choice(["", "done"])
        return self.request(
            END, {**end_fields(*half, verdict), **changes}, opaque=self.opaque(), flag=flag, **head
        )

    # --- odd requests ----------------------------------------------------------------------------

    def odd(self) -> bytes:
        """Return a request that the Python path has to handle, at least in most cases."""
        makers = [
            self._odd_properties,
            self._odd_fields,
            self._odd_header,
            self._odd_half,
            self._odd_end,
            self._other_request,
        ]
        return self._random.choice(makers)()

    def _odd_properties(self) -> bytes:
        key = message_properties(UNIQ_KEY=f"ODD{self.opaque()}")
        text = self._random.choice(
            [
                "",
                key + "DELAY\x013\x02",
                key + "WAIT\x01false\x02",
                key + "TAGS\x01\x02",
                key + "\x02",
                key + "TAGS\x01a\x02TAGS\x01b\x02",
                key + "KEYS\x01a\x02KEYS\x01b\x02",
                key + "UNIQ_KEY\x01second\x02",
                key + "name without value\x02",
                key + "a\x01b\x01c\x02",
                key + "REAL_TOPIC\x01x\x02",
                key + "ESCROW_COPY_OF\x011\x02",
                key + "__CRC32#\x010123456789\x02",
                key + "MSG_REGION\x01elsewhere\x02TRACE_ON\x01true\x02",
                key + "CLUSTER\x01other\x02",
                key + "POP_CK\x011 2 3\x02",
                key + "TIMER_DELAY_SEC\x0110\x02",
                key + "TRAN_MSG\x01false\x02",
                key + "color\x01\u4e2d\u6587\x02",
                key + "color\x01line\nbreak\x02",
                key + "color\x01\x03\x02",
                key + "color\x01" + "x" * 5000 + "\x02",
                "UNIQ_KEY\x01with space\x02",
                "UNIQ_KEY\x01\x02TAGS\x01x\x02",
                key + "zero\x01\x00\x02",
            ]
        )
        return self.send(properties=text)

    def _odd_fields(self) -> bytes:
        changes: dict[str, str] = self._random.choice(
            [
                {"e": "-1"},
                {"e": "99"},
                {"e": "01"},
                {"e": "+1"},
                {"e": " 1"},
                {"e": "-0"},
                {"e": "1.0"},
                {"f": "4"},
                {"f": "8"},
                {"f": "12"},
                {"f": "16"},
                {"f": "64"},
                {"g": "99999999999999999999"},
                {"h": "-1"},
                {"j": "-3"},
                {"k": "TRUE"},
                {"m": "true"},
                {"m": "1"},
                {"b": "unknown-topic"},
                {"b": "RMQ_SYS_TRANS_HALF_TOPIC"},
                {"b": "bad topic"},
                {"b": ""},
                {"bulk": "true"},
                {"signature": "x"},
                {"l": "16"},
                {"l": "x"},
            ]
        )
        return self.send(**changes)

    def _odd_header(self) -> bytes:
        fields = send_fields(i=message_properties(UNIQ_KEY=f"HEAD{self.opaque()}"))
        opaque, random = self.opaque(), self._random
        body = self.body()
        fields = self._sign(fields, body)
        header: dict[str, Any] = {"code": SEND_V2, "extFields": fields, "flag": 0, "opaque": opaque}
        text = json.dumps(header, separators=(",", ":"))
        variants = [
            text,
            json.dumps(header),  # with spaces
            json.dumps(header, indent=1),
            json.dumps({"extFields": fields, "opaque": opaque, "code": SEND_V2, "flag": 0}),
            text.replace('"flag":0', '"flag":0,"flag":0'),
            text.replace('"flag":0', '"flag":4'),
            text.replace('"flag":0', '"flag":"0"'),
            text.replace('"flag":0', '"remark":null,"flag":0'),
            text.replace('"flag":0', '"remark":"\\u4e2d","flag":0'),
            text.replace('"flag":0', '"unknown":{"a":[1,2]},"flag":0'),
            text.replace('"flag":0', '"language":"KLINGON","flag":0'),
            text.replace(f'"opaque":{opaque}', f'"opaque":-{opaque}'),
            text.replace('"code":310', '"code":310.0'),
            text.replace('"e":"0"', '"e":0'),
            text.replace('"e":"0"', '"e":"0","e":"1"'),
            text.replace('"k":"false"', '"k":false'),
            text.replace('"b":"T"', '"b":"\\u0054"'),
            text.replace('"a":"producers"', '"a":"\\u0070roducers"'),
        ]
        if random.random() < 0.2:
            command = Command(code=SEND_V2, opaque=opaque, ext_fields=fields)
            return encode_frame(ROCKETMQ, encode_command(command, ROCKETMQ), body)
        return encode_frame(JSON, random.choice(variants).encode(), body)

    def _odd_half(self) -> bytes:
        random = self._random
        # Perhaps a repeated send, of a message that has arrived: the last ones may be on their way.
        key = random.choice(self.keys[-100:-60] or ["first"])
        group = random.choice(["producers", "bank", "x" * 70, ""])
        items = {"TRAN_MSG": "true", "UNIQ_KEY": key, "PGROUP": group}
        items |= random.choice(
            [
                {},
                {"DELAY": "2"},
                {"CHECK_IMMUNITY_TIME_IN_SECONDS": "20"},
                {"ESCROW_WRITER": "w", "ESCROW_BATCH": "1", "ESCROW_ATTEMPT": "a"},
                {"__transactionId__": "x"},
                {"TRAN_PREPARED_QUEUE_OFFSET": "1"},
            ]
        )
        names = list(items)
        random.shuffle(names)
        text = message_properties(**{name: items[name] for name in names})
        if random.random() < 0.2:
            text = text[:-1]
        fields = send_fields(random.choice(["T", "orders"]), random.randrange(2), i=text, f="4")
        return self.request(SEND_V2, fields, opaque=self.opaque(), body=self.body())

    def _odd_end(self) -> bytes:
        random = self._random
        known = [*self.open_halves[-5:], *self.ended_halves[-20:-15]] or [("bank", 10**6, 10**9)]
        # How a half is seen that another request of the turn ends depends on the path; the
        # response to a second verdict does not.
        is_ended_in_turn = bool(self.ended_in_turn) and random.random() < 0.3
        half = random.choice(self.ended_in_turn if is_ended_in_turn else known)
        group, queue_offset, log_offset = half
        verdicts: list[dict[str, str]] = [{}, {"commitOrRollback": str(ROLLBACK)}]
        changes = random.choice(
            verdicts
            if is_ended_in_turn
            else [
                *verdicts,
                {"commitOrRollback": str(UNKNOWN)},
                {"commitOrRollback": "5"},
                {"fromTransactionCheck": "true"},
                {"producerGroup": "strangers"},
                {"commitLogOffset": str(log_offset + 1)},
                {"tranStateTableOffset": "999999"},
                {"tranStateTableOffset": "-1"},
                {"bname": "broker-a", "topic": "T"},
                {"other": "field"},
            ]
        )
        fields = {**end_fields(group, queue_offset, log_offset, COMMIT), **changes}
        head: dict[str, Any] = {}
        if random.random() < 0.3:
            head["remark"] = "the database is down"
        body = b"unexpected" if random.random() < 0.1 else b""
        flag = FLAG_ONEWAY if random.random() < 0.3 else 0
        return self.request(END, fields, opaque=self.opaque(), flag=flag, body=body, **head)

    def _other_request(self) -> bytes:
        random, opaque = self._random, self.opaque()
        text = message_properties(UNIQ_KEY=f"V1{opaque}")
        return random.choice(
            [
                self.request(
                    SEND,
                    {"producerGroup": "p", "topic": "T", "queueId": "1", "properties": text},
                    opaque=opaque,
                    body=self.body(),
                ),
                self.request(9999, {}, opaque=opaque),
                self.request(1, {"code": "1"}, opaque=opaque, flag=1),  # a response to nothing
            ]
        )

    def read(self) -> bytes:
        """Return a request that reads. What it sees of requests before it depends on the turn."""
        opaque, queue_id = self.opaque(), str(self._random.randrange(2))
        pull = {
            "consumerGroup": "readers",
            "topic": "T",
            "queueId": queue_id,
            "queueOffset": "0",
            "maxMsgNums": "32",
            "sysFlag": "4",
            "subscription": self._random.choice(["*", "paid"]),
        }
        if self._random.random() < 0.5:
            return self.request(11, pull, opaque=opaque)
        return self.request(30, {"topic": "T", "queueId": queue_id}, opaque=opaque)
