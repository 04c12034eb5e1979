"""Questions about the properties of a message on its way in, asked of every one.

Of the text as it came, not of its bytes, and one literal at a time: Python finds a literal in text
five times faster than in bytes, and twice as fast as a pattern. What only looks like the name that
is sought is told apart where it matters.
"""

from __future__ import annotations

from escrowmq.message.properties import find_property


def is_plain(properties: str) -> bool:
    """Whether nothing in them asks for more than an append: a name or a value that only looks
    as if it did takes the long way, which looks closely."""
    return (
        "TRAN_MSG\x01" not in properties
        and ("\x02UNIQ_KEY\x01" in properties or properties[:9] == "UNIQ_KEY\x01")
        and "\0" not in properties
        and "DELAY\x01" not in properties
        and "TIMER_D" not in properties
        and "WAIT\x01false" not in properties
        and "MSG_REGION\x01" not in properties
        and "POP_CK\x01" not in properties
        and "UNIQ_KEY\x01\x02" not in properties
        and properties[-1] != "\x01"
    )


def is_plain_half(properties: str) -> bool:
    """Whether they make a half of the message and ask for nothing else."""
    return (
        ("\x02TRAN_MSG\x01true\x02" in properties or properties[:14] == "TRAN_MSG\x01true\x02")
        and ("\x02UNIQ_KEY\x01" in properties or properties[:9] == "UNIQ_KEY\x01")
        and properties.count("TRAN_MSG\x01") == 1
        and "\0" not in properties
        and "DELAY\x01" not in properties
        and "TIMER_D" not in properties
        and "WAIT\x01false" not in properties
        and "MSG_REGION\x01" not in properties
        and "POP_CK\x01" not in properties
        and "UNIQ_KEY\x01\x02" not in properties
        and "REAL_" not in properties
        and "ESCROW_" not in properties
        and "CHECK_IMMUNITY" not in properties
        and "__transactionId__" not in properties
        and properties[-1] != "\x01"
    )


def has_unique_key(properties: str) -> bool:
    return find_property(properties.encode(), b"UNIQ_KEY") is not None


def is_hasty(properties: str) -> bool:
    return find_property(properties.encode(), b"WAIT") == b"false"


def is_special(properties: str) -> bool:
    """Whether a record has to be looked at again before it is appended."""
    return "DELAY\x01" in properties or "TIMER_D" in properties or "TRAN_MSG\x01" in properties
