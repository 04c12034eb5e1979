"""Java's fastjson dialect, as far as it is not JSON: number keys without quotes.

    {0:"10.0.0.1:10911",1:"10.0.0.2:10911"}  ->  {"0":"10.0.0.1:10911","1":"10.0.0.2:10911"}

Name servers and brokers write maps with number keys like this to old clients, and into their
configuration files. Objects as keys, which fastjson also writes, are not read here.

The name that somebody may have meant.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

import msgspec

from escrowmq.errors import BrokenBody

# A string is taken whole, so that nothing inside it is mistaken for a key. One that never ends is
# taken to the end of the text: trying again at each quote inside it would be quadratic.
_STRING_OR_KEY = re.compile(
    r"""
      "(?:[^"\\]|\\.)*+(?:"|\\?\Z)
    | (?P<before>[{,]\s*+)(?P<key>-?\d++)(?=\s*+:)
    """,
    re.VERBOSE | re.DOTALL | re.ASCII,
)


def parse_lenient_json(data: bytes | memoryview) -> Any:
    """What this JSON says, number keys quoted or not. Raises BrokenBody, whatever is wrong."""
    try:
        text = str(data, "utf-8")
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError:
            return msgspec.json.decode(quote_number_keys(text))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BrokenBody(f"JSON: {error}") from error


def quote_number_keys(text: str) -> str:
    """The same text with its number keys quoted; JSON, if nothing else was wrong with it."""
    return _STRING_OR_KEY.sub(_quote, text)


def _quote(match: re.Match[str]) -> str:
    key = match["key"]
    return match[0] if key is None else f'{match["before"]}"{key}"'


def did_you_mean(text: str, candidates: Iterable[str]) -> str:
    """`; did you mean …?`, or nothing."""
    by_folded = {name.lower(): name for name in candidates}
    found = get_close_matches(text.lower(), by_folded, n=1, cutoff=0.6)
    return f"; did you mean {by_folded[found[0]]}?" if found else ""
