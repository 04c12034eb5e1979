"""Responses to a broker that reads nothing are bounded."""

from __future__ import annotations

import asyncio

import pytest

from escrowmq.client.connection import UNREAD_BYTES_MAX, ClientConnection


class UnreadTransport(asyncio.Transport):
    """Keeps everything that is written, as the transport of a peer that reads nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.unread_bytes = 0
        self.is_aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.unread_bytes += len(data)

    def get_write_buffer_size(self) -> int:
        return self.unread_bytes

    def abort(self) -> None:
        self.is_aborted = True


async def test_a_broker_that_reads_no_responses_loses_the_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    connection, transport = ClientConnection("10.0.0.1:1", lambda *_: None), UnreadTransport()
    connection.connection_made(transport)
    connection.pause_writing()
    response = bytes(1 << 20)
    for _ in range(UNREAD_BYTES_MAX // len(response)):
        connection.write(response)
    assert not transport.is_aborted
    connection.write(response)
    assert transport.is_aborted
    assert "has not read" in caplog.text
    await asyncio.sleep(0)  # the responses that were joined in this turn are written
    assert transport.unread_bytes <= UNREAD_BYTES_MAX
