"""The types of settings: what a value may be, how text becomes a value, and back.

Every source delivers text, so each type has one parser. `parse()` and `check()` raise ValueError
with a text that completes "listenPort='x': ", such as "must be true or false".
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from escrowmq.parsing import format_duration, parse_address, parse_duration_ms, parse_servers
from escrowmq.secret import Secret

INT_MAX: Final = (1 << 31) - 1  # RocketMQ keeps most of its settings in a Java int
_NUMBER: Final = re.compile(r"[+-]?[0-9]{1,19}", re.ASCII)
_HOST: Final = re.compile(r"[A-Za-z0-9._:%-]+", re.ASCII)
WILDCARD_ADDRESSES: Final = frozenset({"0.0.0.0", "::"})


class SettingType(Protocol):
    @property
    def allowed(self) -> str:
        """The allowed values, for messages and documentation."""

    @property
    def separator(self) -> str | None:
        """The separator of a list; None if the type is not a list."""

    def parse(self, text: str) -> object:
        """Return the value. Raises ValueError."""

    def check(self, value: object) -> None:
        """Raise ValueError if the value is not allowed."""

    def format(self, value: object) -> str:
        """Return the text of a value in a file; `parse()` turns it back."""


@dataclass(frozen=True, slots=True)
class WholeNumber:
    minimum: int = 0
    maximum: int = INT_MAX
    multiple_of: int = 1  # parse() rounds up
    separator: None = None

    @property
    def allowed(self) -> str:
        if self.minimum == self.maximum:
            return f"{self.minimum}"
        return f"a whole number from {self.minimum} to {self.maximum}"

    def parse(self, text: str) -> int:
        if _NUMBER.fullmatch(text) is None:
            raise ValueError(f"must be {self.allowed}")
        value = -(-int(text) // self.multiple_of) * self.multiple_of
        self.check(value)
        return value

    def check(self, value: object) -> None:
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"must be {self.allowed}")
        if not self.minimum <= value <= self.maximum or value % self.multiple_of:
            raise ValueError(f"must be {self.allowed}")

    def format(self, value: object) -> str:
        return str(value)


@dataclass(frozen=True, slots=True)
class Boolean:
    allowed: str = "true or false"
    separator: None = None

    def parse(self, text: str) -> bool:
        # RocketMQ reads every word except "true" as false. Here a misspelt "true" is an error.
        match text.lower():
            case "true":
                return True
            case "false":
                return False
        raise ValueError(f"must be {self.allowed}")

    def check(self, value: object) -> None:
        if not isinstance(value, bool):
            raise ValueError(f"must be {self.allowed}")

    def format(self, value: object) -> str:
        return "true" if value else "false"


@dataclass(frozen=True, slots=True)
class PrintableName:
    """A name of printable characters without surrounding spaces."""

    chars_max: int = 255
    separator: None = None

    @property
    def allowed(self) -> str:
        return f"1 to {self.chars_max} printable characters"

    def parse(self, text: str) -> str:
        self.check(text)
        return text

    def check(self, value: object) -> None:
        if not isinstance(value, str) or not 1 <= len(value) <= self.chars_max:
            raise ValueError(f"must be {self.allowed}")
        if not value.isprintable() or value != value.strip():
            raise ValueError(f"must be {self.allowed}")

    def format(self, value: object) -> str:
        return str(value)


@dataclass(frozen=True, slots=True)
class DirectoryPath:
    allowed: str = "a path"
    separator: None = None

    def parse(self, text: str) -> Path:
        if not text:
            raise ValueError(f"must be {self.allowed}")
        value = Path(text)
        self.check(value)
        return value

    def check(self, value: object) -> None:
        if not isinstance(value, Path) or not str(value).isprintable():
            raise ValueError(f"must be {self.allowed}")
        if str(value).startswith("~"):
            raise ValueError("must not begin with ~, which only a shell expands")

    def format(self, value: object) -> str:
        return str(value)


@dataclass(frozen=True, slots=True)
class HostAddress:
    """An address or a host name. If it is empty, the server chooses an address."""

    is_listen_address: bool
    can_be_empty: bool = False
    separator: None = None

    @property
    def allowed(self) -> str:
        if self.is_listen_address:
            return "an address of this machine, or 0.0.0.0" + ", or empty" * self.can_be_empty
        return "an address that clients can reach, or empty"

    def parse(self, text: str) -> str:
        self.check(text)
        return text

    def check(self, value: object) -> None:
        if not isinstance(value, str) or len(value) > 255:
            raise ValueError(f"must be {self.allowed}")
        if value == "" and (self.can_be_empty or not self.is_listen_address):
            return
        if _HOST.fullmatch(value) is None or (
            value in WILDCARD_ADDRESSES and not self.is_listen_address
        ):
            raise ValueError(f"must be {self.allowed}")

    def format(self, value: object) -> str:
        return str(value)


@dataclass(frozen=True, slots=True)
class Choice:
    choices: type[enum.Enum]
    # Values of RocketMQ that EscrowMQ does not have, each with the reason.
    unsupported: Mapping[str, str] = field(default_factory=dict)
    separator: None = None

    @property
    def allowed(self) -> str:
        return " or ".join(choice.value for choice in self.choices)

    def parse(self, text: str) -> enum.Enum:
        word = text.upper()
        if word in self.unsupported:
            raise ValueError(f"{self.unsupported[word]}; it must be {self.allowed}")
        try:
            return self.choices(word)
        except ValueError:
            raise ValueError(f"must be {self.allowed}") from None

    def check(self, value: object) -> None:
        if not isinstance(value, self.choices):
            raise ValueError(f"must be {self.allowed}")

    def format(self, value: object) -> str:
        assert isinstance(value, enum.Enum)
        return str(value.value)


@dataclass(frozen=True, slots=True)
class AddressList:
    allowed: str = "one or more host:port, separated by ; or ,"
    separator: str = ";"

    def parse(self, text: str) -> tuple[str, ...]:
        if not text.strip():
            return ()
        try:
            return tuple(parse_servers(text))
        except ValueError:
            raise ValueError(f"must be {self.allowed}") from None

    def check(self, value: object) -> None:
        if not isinstance(value, tuple) or not all(isinstance(part, str) for part in value):
            raise ValueError(f"must be {self.allowed}")
        for address in value:
            try:
                parse_address(address)
            except ValueError:
                raise ValueError(f"must be {self.allowed}") from None

    def format(self, value: object) -> str:
        assert isinstance(value, tuple)
        return self.separator.join(value)


@dataclass(frozen=True, slots=True)
class HoursOfDay:
    allowed: str = "one or more hours from 0 to 23, separated by ;"
    separator: str = ";"

    def parse(self, text: str) -> tuple[int, ...]:
        parts = _split_list(text)
        if not all(_NUMBER.fullmatch(part) for part in parts):
            raise ValueError(f"must be {self.allowed}")
        value = tuple(int(part) for part in parts)
        self.check(value)
        return value

    def check(self, value: object) -> None:
        if not isinstance(value, tuple) or not value:
            raise ValueError(f"must be {self.allowed}")
        if not all(type(hour) is int and 0 <= hour <= 23 for hour in value):
            raise ValueError(f"must be {self.allowed}")

    def format(self, value: object) -> str:
        assert isinstance(value, tuple)
        return self.separator.join(f"{hour:02}" for hour in value)


@dataclass(frozen=True, slots=True)
class NumberPerName:
    """A number for each of several names: `orders=5000;billing=60000`."""

    separator: None = None
    allowed: str = "name=number pairs, separated by ;"

    def parse(self, text: str) -> tuple[tuple[str, int], ...]:
        pairs = []
        for part in filter(None, (part.strip() for part in text.split(";"))):
            name, _, number = (side.strip() for side in part.partition("="))
            if not name or not number.isdecimal() or len(number) > 9:
                raise ValueError(f"must be {self.allowed}")
            pairs.append((name, int(number)))
        return tuple(pairs)

    def check(self, value: object) -> None:
        if not isinstance(value, tuple):
            raise ValueError(f"must be {self.allowed}")

    def format(self, value: object) -> str:
        assert isinstance(value, tuple)
        return ";".join(f"{name}={number}" for name, number in value)


@dataclass(frozen=True, slots=True)
class DelayLevels:
    """Delays such as `1s 5s 1m 2h`; the value is in milliseconds. The first is level 1."""

    levels_max: int = 100
    separator: str = " "

    @property
    def allowed(self) -> str:
        return f"1 to {self.levels_max} times such as 5s, 10m, 2h or 1d, separated by spaces"

    def parse(self, text: str) -> tuple[int, ...]:
        try:
            value = tuple(parse_duration_ms(part) for part in text.split())
        except ValueError:
            raise ValueError(f"must be {self.allowed}") from None
        self.check(value)
        return value

    def check(self, value: object) -> None:
        if not isinstance(value, tuple) or not 1 <= len(value) <= self.levels_max:
            raise ValueError(f"must be {self.allowed}")
        if not all(type(ms) is int and ms >= 0 and ms % 1_000 == 0 for ms in value):
            raise ValueError(f"must be {self.allowed}")

    def format(self, value: object) -> str:
        assert isinstance(value, tuple)
        return self.separator.join(map(format_duration, value))


@dataclass(frozen=True, slots=True)
class OptionalFile:
    allowed: str = "a path, or empty"
    separator: None = None

    def parse(self, text: str) -> Path | None:
        return DirectoryPath(allowed=self.allowed).parse(text) if text else None

    def check(self, value: object) -> None:
        if value is not None:
            DirectoryPath(allowed=self.allowed).check(value)

    def format(self, value: object) -> str:
        return "" if value is None else str(value)


@dataclass(frozen=True, slots=True)
class SecretText:
    """A secret, which is never shown."""

    allowed: str = "any text; it is not shown"
    separator: None = None

    def parse(self, text: str) -> Secret:
        return Secret(text)

    def check(self, value: object) -> None:
        if not isinstance(value, Secret):
            raise ValueError(f"must be {self.allowed}")

    def format(self, value: object) -> str:
        return "***" if value else ""


@dataclass(frozen=True, slots=True)
class CredentialsText(SecretText):
    """An account in RocketMQ's format, `{"accessKey":"...","secretKey":"..."}`."""

    allowed: str = '{"accessKey":"...","secretKey":"..."}, or empty; it is not shown'

    def parse(self, text: str) -> Secret:
        value = Secret(text)
        self.check(value)
        return value

    def check(self, value: object) -> None:
        SecretText.check(self, value)
        assert isinstance(value, Secret)
        if value:
            read_credentials(value)


def read_credentials(credentials: Secret) -> tuple[str, Secret]:
    """Return access key and secret key. Raises ValueError, which does not contain them."""
    try:
        content = json.loads(credentials.reveal())
        key, secret = content["accessKey"], content["secretKey"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError('must be {"accessKey":"...","secretKey":"..."}') from None
    if not isinstance(key, str) or not isinstance(secret, str) or not key or not secret:
        raise ValueError("accessKey and secretKey must be non-empty strings")
    return key, Secret(secret)


def _split_list(text: str) -> tuple[str, ...]:
    return tuple(part for piece in text.split(";") if (part := piece.strip()))
