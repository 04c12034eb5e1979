"""What a name server takes from the network, and what it refuses."""

from __future__ import annotations

from typing import Final

from escrowmq.errors import RequestRefused
from escrowmq.wire.codes import ResponseCode

NAME_LENGTH_MAX: Final = 512
_SHOWN_MAX = 64  # of a name in a remark


def refuse(remark: str) -> RequestRefused:
    return RequestRefused(ResponseCode.SYSTEM_ERROR, remark)


def shown(name: str) -> str:
    """For a remark: all of a name that we would take, the beginning of one that is too long."""
    return name if len(name) <= NAME_LENGTH_MAX else f"{name[:_SHOWN_MAX]}..."


def check_name(what: str, name: str, *, may_be_empty: bool = False) -> None:
    if not name and not may_be_empty:
        raise refuse(f"{what} is empty")
    if len(name) > NAME_LENGTH_MAX:
        raise refuse(
            f"{what} has {len(name)} characters, the limit is {NAME_LENGTH_MAX}: {shown(name)}"
        )


def check_number(what: str, number: int, least: int, most: int) -> None:
    if not least <= number <= most:
        raise refuse(f"{what} is {number}, not between {least} and {most}")
