"""Brokers as people and programs read them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any, Final

from escrowmq.cli.brokers import Brokers
from escrowmq.cli.call import BrokerPlace
from escrowmq.cli.figures import runtime
from escrowmq.cli.pending import duration_text
from escrowmq.cli.record import printable
from escrowmq.cli.table import Column, field_lines, table_lines, width_of

_LIST: Final = (
    Column("BROKER", gives_way=True),
    Column("ADDRESS"),
    Column("VERSION", gives_way=True),
    Column("UP"),
    Column("IN/S", is_number=True),
    Column("OUT/S", is_number=True),
    Column("DISK", is_number=True),
    Column("STATE"),
)
_UNITS_S: Final = {"days": 86_400, "hours": 3_600, "minutes": 60, "seconds": 1}


def found_brokers(brokers: Brokers) -> tuple[list[dict[str, Any]], Iterable[str]]:
    content = [_as_json(place, table) for place, table in brokers.ask(runtime)]
    rows = (
        (
            printable(row["broker"]),
            row["address"],
            printable(row["version"]),
            duration_text(row["up_s"] * 1000),
            f"{row['in_per_s']:.1f}",
            f"{row['out_per_s']:.1f}",
            disk_text(row["disk_used"]),
            "ok" if row["takes_messages"] else "takes no messages",
        )
        for row in content
    )
    return content, table_lines(_LIST, rows, width_of(sys.stdout))


def _as_json(place: BrokerPlace, table: dict[str, str]) -> dict[str, Any]:
    return {
        "broker": place.name,
        "address": place.address,
        "version": table.get("brokerVersionDesc", ""),
        "up_s": up_s(table),
        "in_per_s": rate(table, "putTps"),
        "out_per_s": rate(table, "getTransferedTps"),
        "disk_used": disk_ratio(table),
        "takes_messages": table.get("brokerActive", "true") == "true",
    }


def shown_broker(brokers: Brokers) -> tuple[list[dict[str, Any]], Iterable[str]]:
    found = brokers.ask(runtime)
    content = [{"broker": place.name, "address": place.address, **told} for place, told in found]
    return content, _show_lines(content)


def _show_lines(content: list[dict[str, Any]]) -> Iterator[str]:
    for number, table in enumerate(content):
        if number:
            yield ""
        yield from field_lines((name, printable(value)) for name, value in table.items())


# --- figures among the texts ---------------------------------------------------------------------


def up_s(table: dict[str, str]) -> int:
    """`[ 1 days, 2 hours, 3 minutes, 4 seconds ]`"""
    parts = re.findall(r"(\d+) (days|hours|minutes|seconds)", table.get("runtime", ""))
    return sum(int(count) * _UNITS_S[unit] for count, unit in parts)


def rate(table: dict[str, str], name: str) -> float:
    """Over the last ten seconds."""
    first = table.get(name, "").partition(" ")[0]
    try:
        return float(first)
    except ValueError:
        return 0.0


def disk_ratio(table: dict[str, str]) -> float | None:
    try:
        return float(table["commitLogDiskRatio"])
    except (KeyError, ValueError):
        return None


def disk_text(used: float | None) -> str:
    return "-" if used is None else f"{used:.0%}"
