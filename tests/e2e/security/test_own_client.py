"""The client and the commands sign their requests and hide their secrets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from escrowmq import Access, Consumer, Message, Producer
from escrowmq.cli.main import cli
from escrowmq.errors import EscrowError, NotSent, RequestRefused
from tests.support.acl_broker import ADMIN, READER, WRITER, broker_with_acl
from tests.support.signing import Certificates, SignedClient

# --- our client ----------------------------------------------------------------------------------


async def test_the_client_signs_its_requests_over_tls(
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
        async with Consumer(
            servers, group="readers", subscribe=subscribe, access=reader
        ) as consumer:
            assert [(await consumer.receive()).body for _ in range(2)] == [b"1", b"2"]
        async with Producer(servers, group="g", access=reader) as producer:
            with pytest.raises(RequestRefused, match="no permission: PUB on topic orders"):
                await producer.send(Message("orders", b"3"))
        async with Producer(servers, group="g", access=Access(*WRITER)) as producer:
            with pytest.raises(EscrowError):
                await producer.send(Message("orders", b"plain"))
        async with Producer(servers, group="g", access=Access(*WRITER, tls=True)) as producer:
            with pytest.raises(NotSent, match="certificate"):
                await producer.send(Message("orders", b"untrusted"))


async def test_a_broker_that_accepts_only_strong_signatures(tmp_path: Path) -> None:
    """The broker registers with its name server, clients use both, and commands work."""
    with broker_with_acl(tmp_path, {"escrowStrongSignatureOnly": "true"}) as server:
        servers = server.namesrv_address
        strong = Access(*ADMIN, strong_signature=True)
        async with Producer(servers, group="g", access=strong) as producer:
            for number in range(50):
                await producer.send(Message("orders", b"%d" % number))
            async with producer.transaction(Message("orders", b"last")):
                pass
        async with Consumer(
            servers, group="readers", subscribe={"orders": "*"}, access=strong
        ) as consumer:
            assert len([await consumer.receive() for _ in range(51)]) == 51
        async with Producer(servers, group="g", access=Access(*ADMIN)) as producer:
            with pytest.raises(EscrowError, match="strong"):
                await producer.send(Message("orders", b"weak"))
        command = ["transaction", "list", "-n", servers]
        variables = {"ESCROWMQ_ACCESS_KEY": ADMIN[0], "ESCROWMQ_SECRET_KEY": ADMIN[1]}
        accepted = run_command(*command, "--strong-signature", environment=variables)
        assert accepted.exit_code == 0, (accepted.output, accepted.exception)
        refused = run_command(*command, environment=variables)
        assert "strong" in str(refused.exception)


def test_the_text_of_an_access_contains_no_secret() -> None:
    access = Access("key", "secret-1234", "token-1234")
    assert "1234" not in f"{access!r}{access}"
    with pytest.raises(ValueError, match="belong together") as refused:
        Access("", "secret-1234")
    assert "1234" not in str(refused.value)


# --- our commands --------------------------------------------------------------------------------


def run_command(*arguments: str, environment: dict[str, str] | None = None) -> Result:
    """Run a command; the only ESCROWMQ_ variables in its environment are the given ones."""
    removed = dict.fromkeys(name for name in os.environ if name.startswith("ESCROWMQ_"))
    return CliRunner().invoke(cli, arguments, env={**removed, **(environment or {})})


def test_commands_take_credentials_from_the_environment_or_a_file(
    tmp_path: Path, certificates: Certificates
) -> None:
    with broker_with_acl(tmp_path, certificates.conf()) as server:
        command = ["transaction", "list", "-n", server.namesrv_address]
        command += ["--tls-ca", str(certificates.ca)]
        variables = {"ESCROWMQ_ACCESS_KEY": ADMIN[0], "ESCROWMQ_SECRET_KEY": ADMIN[1]}
        file = tmp_path / "tools.yml"
        file.write_text(f"accessKey: {ADMIN[0]}\nsecretKey: {ADMIN[1]}\n")
        for result in (
            run_command(*command, environment=variables),
            run_command(*command, "--credentials", str(file)),
        ):
            assert result.exit_code == 0, (result.output, result.exception)
        file.write_text(f"secretKey {ADMIN[1]}")
        only_secret = {"ESCROWMQ_SECRET_KEY": ADMIN[1]}
        wrong_secret = ("--access-key", ADMIN[0], "--secret-key", "wrong-wrong")
        refusals = {
            "requires an access key": run_command(*command),
            "belong together": run_command(*command, environment=only_secret),
            "is wrong": run_command(*command, *wrong_secret),
            "must have the lines": run_command(*command, "--credentials", str(file)),
        }
        for reason, result in refusals.items():
            assert isinstance(result.exception, EscrowError)
            assert reason in str(result.exception)
            assert ADMIN[1] not in f"{result.output}{result.exception!r}"
