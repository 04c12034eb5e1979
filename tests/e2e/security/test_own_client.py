"""The client and the commands sign their requests and hide their secrets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from escrowmq import Access, Consumer, Message, Producer
from escrowmq.cli.main import cli
from escrowmq.errors import EscrowError, NotSent, RequestRefused
from tests.support.acl_broker import ADMIN, READER, WRITER, broker_with_acl
from tests.support.signing import Certificates, SignedClient

# --- our client ----------------------------------------------------------------------------------


async def test_the_client_signs_and_hides_its_secret(
    tmp_path: Path, certificates: Certificates
) -> None:
    with broker_with_acl(tmp_path, certificates.conf()) as server:
        tls = certificates.client()
        with SignedClient(server.address, *ADMIN, tls=tls) as admin:
            admin.create_topic("orders", queues=1)
        servers = server.namesrv_address
        writer = Access(*WRITER, tls=tls)
        async with Producer(servers, group="g", access=writer) as producer:
            await producer.send(Message("orders", b"1"))
            async with producer.transaction(Message("orders", b"2")):
                pass
        subscribe = {"orders": "*"}
        reader = Access(READER[0], READER[1], "a-token", tls=tls)
        async with Consumer(servers, group="readers", subscribe=subscribe, access=reader) as got:
            assert [(await got.receive()).body for _ in range(2)] == [b"1", b"2"]
        async with Producer(servers, group="g", access=reader) as producer:
            with pytest.raises(RequestRefused, match="no permission: PUB on topic orders"):
                await producer.send(Message("orders", b"3"))
        async with Producer(servers, group="g", access=Access(*WRITER)) as producer:
            with pytest.raises(EscrowError):
                await producer.send(Message("orders", b"plain"))
        async with Producer(servers, group="g", access=Access(*WRITER, tls=True)) as producer:
            with pytest.raises(NotSent, match="certificate"):
                await producer.send(Message("orders", b"untrusted"))


def test_an_access_does_not_show_its_secrets() -> None:
    access = Access("key", "secret-1234", "token-1234")
    assert "1234" not in f"{access!r}{access}"
    with pytest.raises(ValueError, match="belong together") as caught:
        Access("", "secret-1234")
    assert "1234" not in str(caught.value)


# --- our commands --------------------------------------------------------------------------------


def escrowmq(*arguments: str, environment: dict[str, str] | None = None) -> tuple[str, Exception]:
    """Return what the command printed, and the error it ended with."""
    ended = CliRunner().invoke(cli, arguments, env={**BARE, **(environment or {})})
    error = ended.exception
    return ended.output, error if isinstance(error, Exception) else Exception("it ended well")


BARE = dict.fromkeys(name for name in os.environ if name.startswith("ESCROWMQ_"))


def test_a_command_authenticates(tmp_path: Path, certificates: Certificates) -> None:
    with broker_with_acl(tmp_path, certificates.conf()) as server:
        asked = ["transaction", "list", "-n", server.namesrv_address, "--tls-ca"]
        asked.append(str(certificates.ca))
        by_environment = {"ESCROWMQ_ACCESS_KEY": ADMIN[0], "ESCROWMQ_SECRET_KEY": ADMIN[1]}
        file = tmp_path / "tools.yml"
        file.write_text(f"accessKey: {ADMIN[0]}\nsecretKey: {ADMIN[1]}\n")
        for output, error in (
            escrowmq(*asked, environment=by_environment),
            escrowmq(*asked, "--credentials", str(file)),
        ):
            assert str(error) == "it ended well", output
        file.write_text(f"secretKey {ADMIN[1]}")
        refusals = {
            "requires an access key": escrowmq(*asked),
            "belong together": escrowmq(*asked, environment={"ESCROWMQ_SECRET_KEY": ADMIN[1]}),
            "is wrong": escrowmq(*asked, "--access-key", ADMIN[0], "--secret-key", "wrong-wrong"),
            "must have the lines": escrowmq(*asked, "--credentials", str(file)),
        }
        for why, (output, error) in refusals.items():
            assert isinstance(error, EscrowError)
            assert why in str(error)
            assert ADMIN[1] not in f"{output}{error!r}"
