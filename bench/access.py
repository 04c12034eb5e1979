"""The cost of signatures and TLS: the same sends plain, signed, through TLS, and both."""

from __future__ import annotations

import contextlib
import os
import ssl
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from bench.broker import ResultTable
from bench.measure import Plan
from bench.samples import directory
from tests.support.brokers import Server
from tests.support.signing import Certificates, SignedClient

COLUMNS = ("what", "messages/s", "CPU of the server for each", "to plain")
NOTES = (
    "Bodies of 1 KiB on one connection, 32 requests under way; the client repeats one request that "
    "was signed before, and shares the cores with the server.",
    "The last column is the processor time beside that of plain sends. Variants take turns; a "
    "figure is the median of its rounds.",
)
KEYS = "bench-key", "bench-secret-123"
BODY = b"x" * 1024
WINDOW = 32


class Variant:
    def __init__(self, path: Path, *, signed: bool, tls: Certificates | None) -> None:
        path.mkdir()
        rules = path / "acl.yml"
        rules.write_text(f"accounts: [{{accessKey: {KEYS[0]}, secretKey: {KEYS[1]}, admin: true}}]")
        conf: dict[str, object] = {} if tls is None else tls.conf()
        if signed:
            conf |= {"aclEnable": "true", "escrowAclFile": rules}
        self._server = Server(path, conf=conf)
        self._keys = KEYS if signed else ("", "")
        self._tls: ssl.SSLContext | None = None if tls is None else tls.client()

    def start(self, stack: contextlib.ExitStack) -> None:
        stack.enter_context(self._server)
        self._client = stack.enter_context(
            SignedClient(self._server.address, *self._keys, tls=self._tls)
        )
        self._client.create_topic("orders")
        self._client.send("orders", BODY)
        self._frames = self._client.sent_frame * WINDOW

    def run(self, seconds: float) -> tuple[float, float]:
        """Return messages per second and the server's CPU time per message in microseconds."""
        began_s, cpu_s, count = time.monotonic(), self._cpu_s(), 0
        while time.monotonic() - began_s < seconds:
            self._client.socket.sendall(self._frames)
            for _ in range(WINDOW):
                assert self._client.next_response_code() == 0
            count += WINDOW
        elapsed_s = time.monotonic() - began_s
        return count / elapsed_s, (self._cpu_s() - cpu_s) / count * 1e6

    def _cpu_s(self) -> float:
        assert self._server._process is not None
        fields = Path(f"/proc/{self._server._process.pid}/stat").read_text().rpartition(")")[2]
        user, system = fields.split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def rows(plan: Plan) -> ResultTable:
    with directory() as path, contextlib.ExitStack() as stack:
        certificates = Certificates(path / "certificates")
        variants = {
            "plain": Variant(path / "plain", signed=False, tls=None),
            "signed, ACL on": Variant(path / "signed", signed=True, tls=None),
            "TLS": Variant(path / "tls", signed=False, tls=certificates),
            "both": Variant(path / "both", signed=True, tls=certificates),
        }
        for variant in variants.values():
            variant.start(stack)
            variant.run(plan.warm_up_s)
        results: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
        for _ in range(plan.rounds):
            for name, variant in variants.items():
                results[name].append(variant.run(plan.seconds))
    return ResultTable(list(_table(results)), list(NOTES), COLUMNS)


def _table(results: dict[str, list[tuple[float, float]]]) -> list[Sequence[str]]:
    medians = {
        name: tuple(statistics.median(values) for values in zip(*rounds, strict=True))
        for name, rounds in results.items()
    }
    plain_us = medians["plain"][1]
    return [
        (name, f"{rate:,.0f}", f"{cpu_us:.1f} us", f"{cpu_us / plain_us:.2f}")
        for name, (rate, cpu_us) in medians.items()
    ]
