"""A text that no log, no error and no repr shows."""

from __future__ import annotations

import hmac


class Secret:
    """A password or key. Only `reveal` returns the text; `str` and `repr` hide it."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return "Secret(***)" if self._text else "Secret()"

    __str__ = __repr__

    def __bool__(self) -> bool:
        return bool(self._text)

    def __eq__(self, other: object) -> bool:
        # The time of the comparison does not depend on where the texts differ.
        return isinstance(other, Secret) and hmac.compare_digest(
            self._text.encode(), other._text.encode()
        )

    def __hash__(self) -> int:
        return hash((Secret, self._text))
