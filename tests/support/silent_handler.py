"""A request handler for tests of the server that do not need responses."""

from __future__ import annotations

from escrowmq.server.server_connection import ServerConnection


class SilentHandler:
    """A handler that never responds. It needs another turn until `turns` have ended."""

    def __init__(self, *, turns: int = 1) -> None:
        self.turns_left = turns

    def handle(self, connection: ServerConnection, request: object, now_ms: int) -> None: ...
    def end_turn(self, now_ms: int) -> bool:
        self.turns_left -= 1
        return self.turns_left > 0

    def channel_closed(self, connection: ServerConnection) -> None: ...
