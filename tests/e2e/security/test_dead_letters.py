"""Dead letters with access control: an administrator handles them, the group alone gets them."""

from __future__ import annotations

from pathlib import Path

from escrowmq import Access, Message
from escrowmq.blocking import Consumer, Producer
from tests.support.acl_broker import ADMIN, READER, WRITER, broker_with_acl
from tests.support.clients import WAIT_S
from tests.support.commands import run


def test_only_an_administrator_resends_and_purges_dead_letters(tmp_path: Path) -> None:
    with broker_with_acl(tmp_path) as server:
        servers = server.namesrv_address

        def dead(account: tuple[str, str], *arguments: str) -> tuple[int, str]:
            keys = ("--access-key", account[0], "--secret-key", account[1])
            result = run("message", "dead", *arguments, "-n", servers, *keys)
            return result.code, result.out + result.err

        with Producer(servers, group="loader", access=Access(*ADMIN)) as producer:
            producer.send(Message("orders", b"1"))
        subscribe = {"orders": "*"}
        access = Access(*READER)
        with Consumer(servers, group="readers", subscribe=subscribe, access=access) as consumer:
            message = consumer.receive(timeout_s=WAIT_S)
            assert message is not None
            consumer.dead_letter(message, cause="refused")
        for arguments in (
            ("list", "--group", "readers"),
            ("resend", "--all", "--group", "readers", "--yes"),
            ("purge", "--group", "readers", "--yes"),
        ):
            for account in (READER, WRITER):
                code, text = dead(account, *arguments)
                assert (code, "permission" in text) == (2, True), text
        assert "refused" in dead(ADMIN, "list")[1]
        code, text = dead(ADMIN, "resend", "--all", "--group", "readers", "--yes")
        assert (code, "1 resent, 0 resent before" in text) == (0, True), text
        with Consumer(servers, group="readers", subscribe=subscribe, access=access) as consumer:
            message = consumer.receive(timeout_s=WAIT_S)
            assert message is not None
            assert message.body == b"1"
        code, text = dead(ADMIN, "purge", "--all", "--yes")
        assert code == 0, text
