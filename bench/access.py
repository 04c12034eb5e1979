"""The cost of signatures and TLS: the same sends plain, signed, through TLS, and both."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Sequence
from pathlib import Path

from bench.broker import ResultTable
from bench.generator import SECURE, Load, built, run
from bench.measure import Plan
from bench.samples import directory
from tests.support.brokers import Server
from tests.support.signing import Certificates, SignedClient

SHAPES = ((64, 1), (16, 32))  # connections, requests in flight on each
COLUMNS = ("what", *(f"{connections} x {depth}" for connections, depth in SHAPES))
NOTES = (
    "Bodies of 1 KiB; 64 x 1 is 64 connections with one request under way on each. A cell: the "
    "processor time of the server for one message, that time beside a plain send, and messages "
    "per second. The load generator, which signs and encrypts too, shares the cores.",
    "Signing slows the generator down, and a server that gets less at a time has more work with "
    "each message. `signed, not checked` shows how much: the same load without ACL.",
    "Variants take turns, so that all of them see the same neighbours; a figure is the median of "
    "its rounds.",
)
KEYS = "bench-key", "bench-secret-123"
TOPIC = "bench"
PLAIN = "plain"


class Variant:
    def __init__(
        self, path: Path, *, is_signed: bool, tls: Certificates | None, has_acl: bool | None = None
    ) -> None:
        """Signatures are checked if there are any, unless `has_acl` says otherwise."""
        path.mkdir()
        rules = path / "acl.yml"
        rules.write_text(f"accounts: [{{accessKey: {KEYS[0]}, secretKey: {KEYS[1]}, admin: true}}]")
        conf: dict[str, object] = {} if tls is None else tls.conf()
        if is_signed if has_acl is None else has_acl:
            conf |= {"aclEnable": "true", "escrowAclFile": rules}
        self._server = Server(path, conf=conf)
        self._keys = KEYS if is_signed else None
        self._tls = None if tls is None else tls.client()

    def start(self, stack: contextlib.ExitStack) -> None:
        stack.enter_context(self._server)
        key, secret = self._keys or ("", "")
        with SignedClient(self._server.address, key, secret, tls=self._tls) as client:
            client.create_topic(TOPIC)

    def run(self, shape: tuple[int, int], seconds: float, warm_up_s: float) -> tuple[float, float]:
        """Return the server's CPU time per message in microseconds, and messages per second."""
        load = Load(
            "send",
            *shape,
            seconds=seconds,
            warm_up_s=warm_up_s,
            topic=TOPIC,
            account=self._keys,
            has_tls=self._tls is not None,
        )
        outcome = run(load, [int(self._server.address.rpartition(":")[2])], [self._server.pid])
        assert not outcome.errors, outcome
        assert not outcome.unanswered, outcome
        return outcome.server_cpu_s / outcome.messages * 1e6, outcome.rate


def rows(plan: Plan) -> ResultTable:
    built(SECURE)
    with directory() as path, contextlib.ExitStack() as stack:
        certificates = Certificates(path / "certificates")
        variants = {
            PLAIN: Variant(path / "plain", is_signed=False, tls=None),
            "signed, not checked": Variant(
                path / "unchecked", is_signed=True, tls=None, has_acl=False
            ),
            "signed, ACL on": Variant(path / "signed", is_signed=True, tls=None),
            "TLS": Variant(path / "tls", is_signed=False, tls=certificates),
            "both": Variant(path / "both", is_signed=True, tls=certificates),
        }
        for variant in variants.values():
            variant.start(stack)
        medians = {shape: _medians(variants, shape, plan) for shape in SHAPES}
    table: list[Sequence[str]] = [
        (name, *(_cell(medians[shape], name) for shape in SHAPES)) for name in variants
    ]
    return ResultTable(table, list(NOTES), COLUMNS)


def _medians(
    variants: dict[str, Variant], shape: tuple[int, int], plan: Plan
) -> dict[str, tuple[float, float]]:
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for _ in range(plan.rounds):
        for name, variant in variants.items():
            results[name].append(variant.run(shape, plan.seconds, plan.warm_up_s))
    return {
        name: (statistics.median(cpu), statistics.median(rate))
        for name, rounds in results.items()
        for cpu, rate in [zip(*rounds, strict=True)]
    }


def _cell(medians: dict[str, tuple[float, float]], name: str) -> str:
    cpu_us, rate = medians[name]
    return f"{cpu_us:.1f} us, {cpu_us / medians[PLAIN][0]:.2f}, {rate:,.0f}/s"
