"""A strategy that damages encoded data."""

from __future__ import annotations

from hypothesis import strategies as st

ANY_BYTE = st.integers(0, 255)


@st.composite
def damaged(
    draw: st.DrawFn,
    content: bytes,
    *,
    changes_max: int = 4,
    new_bytes: st.SearchStrategy[int] = ANY_BYTE,
) -> bytes:
    """Draw a copy of the content, which must not be empty, with a few bytes replaced."""
    result = bytearray(content)
    for _ in range(draw(st.integers(1, changes_max), label="changes")):
        position = draw(st.integers(0, len(result) - 1), label="position")
        result[position] = draw(new_bytes, label="byte")
    return bytes(result)
