"""One blocking connection. Several requests may be under way; answers are told apart by number."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple

from escrowmq.errors import FrameTooLong, NotSent, OutcomeUnknown, RequestRefused
from escrowmq.remoting.codes import JSON
from escrowmq.remoting.command import Command, decode_command, encode_command
from escrowmq.remoting.frame import FRAME_LENGTH_MAX, HEADER_LENGTH_MAX, encode_frame
from escrowmq.remoting.headers import Header, encode_header
from escrowmq.spark.options import SparkAccess

_PREFIX = struct.Struct(">II")


class OutgoingRequest(NamedTuple):
    code: int
    header: Header
    body: bytes = b""


class BlockingReply(NamedTuple):
    code: int
    remark: str
    ext_fields: dict[str, str]
    body: bytes
    version: int = 0  # of whoever answered


class BlockingConnection:
    def __init__(self, address: str, access: SparkAccess) -> None:
        """Raises NotSent."""
        self.address = address
        self._access = access
        self._opaques = itertools.count(1)
        self._socket = access.connect(address, min(access.timeout_s, 10.0))
        self._socket.settimeout(access.timeout_s)

    def __enter__(self) -> BlockingConnection:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    # --- a request and its answer ----------------------------------------------------------------

    def call(self, request: OutgoingRequest) -> BlockingReply:
        return self.call_all([request])[0]

    def call_all(self, requests: Sequence[OutgoingRequest]) -> list[BlockingReply]:
        """All are sent before the first answer is read: one round trip instead of many."""
        numbers = [self.send(asked) for asked in requests]
        answers: dict[int, BlockingReply] = {}
        while len(answers) < len(numbers):
            command, body_bytes = self.receive_head()
            body = bytearray(body_bytes)
            self.receive_into(memoryview(body))
            answers[command.opaque] = BlockingReply(
                command.code, command.remark, command.ext_fields, bytes(body), command.version
            )
        return [answers[number] for number in numbers]

    def call_checked(self, request: OutgoingRequest) -> BlockingReply:
        """The same; any code but success is raised as RequestRefused."""
        reply = self.call(request)
        if reply.code:
            raise RequestRefused(reply.code, reply.remark or f"{self.address} refused")
        return reply

    # --- the two halves of it, for whoever has many under way ------------------------------------

    def send(self, request: OutgoingRequest) -> int:
        """The number that its answer will have."""
        number = next(self._opaques)
        fields = self._access.sign(encode_header(request.header), request.body)
        command = Command(code=request.code, opaque=number, ext_fields=fields)
        try:
            self._socket.sendall(encode_frame(JSON, encode_command(command, JSON), request.body))
        except OSError as error:
            raise NotSent(f"{self.address}: the connection broke: {error}") from error
        return number

    def receive_head(self) -> tuple[Command, int]:
        """The next answer without its body, and how long that is: read it next."""
        while True:
            prefix = bytearray(_PREFIX.size)
            self.receive_into(memoryview(prefix))
            length, mark = _PREFIX.unpack(prefix)
            header_length = mark & HEADER_LENGTH_MAX
            if length > FRAME_LENGTH_MAX or header_length > length - 4:
                raise FrameTooLong(f"{self.address}: a frame of {length} bytes")
            header = bytearray(header_length)
            self.receive_into(memoryview(header))
            command = decode_command(mark >> 24, bytes(header))
            body_bytes = length - 4 - header_length
            if command.is_response:
                return command, body_bytes
            self.receive_into(memoryview(bytearray(body_bytes)))  # a question: not for us

    def receive_into(self, buffer: memoryview) -> None:
        at, end = 0, len(buffer)
        try:
            while at < end:
                got = self._socket.recv_into(buffer[at:])
                if not got:
                    raise OutcomeUnknown(f"{self.address}: the connection closed before the answer")
                at += got
        except TimeoutError:
            raise OutcomeUnknown(
                f"{self.address}: no answer in {self._access.timeout_s:g} s (option timeoutMs)"
            ) from None
        except OSError as error:
            raise OutcomeUnknown(f"{self.address}: the connection broke: {error}") from error
