"""The broker's part in a backup: save and flush everything, and say up to where.

Who copies the files asks twice. What was noted before the second answer speaks of nothing that
lies behind the end that it gives. He sends a token, which the broker leaves in its directory: a
broker may run anywhere, and only the one on this directory can say where its log ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from escrowmq.broker.line import Line
from escrowmq.broker.turn import WhenFlushed
from escrowmq.errors import RequestRefused, StoreError
from escrowmq.store.backup import TOKEN_PATH
from escrowmq.store.disk import Disk, replace_file
from escrowmq.store.status import PutStatus
from escrowmq.store.store import MessageStore
from escrowmq.wire.answers import answer
from escrowmq.wire.codes import ResponseCode
from escrowmq.wire.fastpath import Request
from escrowmq.wire.headers_admin import PrepareBackup, PrepareBackupAnswer

TOKEN_MAX: Final = 64


class Backups:
    def __init__(
        self, disk: Disk, store: MessageStore, save: Callable[[], None], flush: WhenFlushed | None
    ) -> None:
        self._disk = disk
        self._store = store
        self._save = save
        self._flush = flush  # None: here and now

    def prepare(self, line: Line, request: Request[PrepareBackup], now_ms: int) -> None:
        store, token = self._store, request.head.fields.token
        if len(token) > TOKEN_MAX:
            raise RequestRefused(ResponseCode.SYSTEM_ERROR, f"a token of {len(token)} characters")
        try:
            replace_file(self._disk, TOKEN_PATH, token.encode())
            self._save()
            if self._flush is None:
                store.flush()
        except StoreError as error:
            raise RequestRefused(ResponseCode.SYSTEM_ERROR, f"not saved: {error}") from error
        end = store.end

        def flushed(status: PutStatus) -> None:
            if status is PutStatus.PUT_OK:
                fields = PrepareBackupAnswer(log_begin=store.begin, log_end=end)
                line.write(answer(request, fields))
            else:
                code, remark = ResponseCode.SYSTEM_ERROR, f"the log is not flushed: {status.name}"
                line.write(answer(request, code=code, remark=remark))

        if self._flush is None:
            flushed(PutStatus.PUT_OK)
        else:
            self._flush(end, flushed)
