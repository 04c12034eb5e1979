"""Strategies for property tests of remoting: headers of every type, commands, split streams."""

from __future__ import annotations

import types
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from hypothesis import settings
from hypothesis import strategies as st

from escrowmq.remoting.codes import Language
from escrowmq.remoting.command import Command
from escrowmq.remoting.headers import Header
from escrowmq.remoting.requests import REQUESTS

int32 = st.integers(-(2**31), 2**31 - 1)
texts = st.text(st.characters(codec="utf-8"), max_size=12)
bodies = st.binary(max_size=40)

# For a test that runs once per type of header: there are fifty.
fewer_examples = settings(max_examples=max(settings().max_examples // 6, 10))

header_types = sorted(
    {header for pair in REQUESTS.values() for header in (pair.request, pair.response)},
    key=lambda header: header.__name__,
)


def commands(*, code: st.SearchStrategy[int] = int32, version_max: int = 2**31 - 1) -> Any:
    return st.builds(
        Command,
        code=code,
        opaque=int32,
        language=st.sampled_from(Language),
        version=st.integers(-version_max - 1, version_max),
        flag=int32,
        remark=texts,
        ext_fields=st.dictionaries(texts, texts, max_size=4),
    )


def binary_commands() -> st.SearchStrategy[Command]:
    """Return commands that the ROCKETMQ serializer can encode.

    Their codes and versions are short integers, and no name or value is empty.
    """
    nonempty_texts = texts.filter(bool)
    return st.builds(
        Command,
        code=st.integers(-(2**15), 2**15 - 1),
        opaque=int32,
        language=st.sampled_from(Language),
        version=st.integers(-(2**15), 2**15 - 1),
        flag=int32,
        remark=texts,
        ext_fields=st.dictionaries(nonempty_texts, nonempty_texts, max_size=4),
    )


def headers_of(header: type[Header]) -> st.SearchStrategy[Header]:
    hints = get_type_hints(header, include_extras=True)
    return st.builds(header, **{name: _values(hints[name]) for name in header.__struct_fields__})


def _values(hint: Any) -> st.SearchStrategy[Any]:
    origin = get_origin(hint)
    if origin is Annotated:
        (bounds,) = get_args(hint)[1:]
        return st.integers(bounds.ge, bounds.le)
    if origin in (types.UnionType, Union):
        return st.one_of(*map(_values, get_args(hint)))
    strategies: dict[Any, st.SearchStrategy[Any]] = {
        str: texts,
        bool: st.booleans(),
        types.NoneType: st.none(),
    }
    return strategies[hint]


@st.composite
def split_stream(draw: st.DrawFn, stream: bytes) -> list[bytes]:
    """Draw a way to split the stream into pieces, some of which may be empty."""
    cuts = sorted(draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    return [
        stream[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True)
    ]
