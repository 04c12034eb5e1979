"""Options of the source and the sink: one table, read by name, every name checked.

    chosen = choose(options, READ)
    chosen[SERVERS]

A side has a tuple of options; what it does not name is refused, with the name that was perhaps
meant. Spark hands over lower-case names and texts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from escrowmq.errors import BadOption
from escrowmq.spark.suggest import suggestion

T = TypeVar("T")

# What Spark itself puts among the options of a source or sink.
_SPARKS_OWN: Final = frozenset({"checkpointlocation", "queryname", "paths"})


@dataclass(frozen=True)
class Option(Generic[T]):
    name: str
    read: Callable[[str], T]  # raises ValueError with what would be right
    default: T
    says: str
    aliases: tuple[str, ...] = ()
    is_secret: bool = False

    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


@dataclass(frozen=True)
class Chosen:
    """Values by option. It is pickled with the reader, so it holds nothing else."""

    values: Mapping[str, Any]
    given: frozenset[str] = field(default_factory=frozenset)  # what the user said himself

    def __getitem__(self, option: Option[T]) -> T:
        value: T = self.values[option.name]
        return value

    def has(self, option: Option[Any]) -> bool:
        return option.name in self.given


def choose(given: Mapping[str, str], table: Sequence[Option[Any]]) -> Chosen:
    """Raises BadOption: an unknown name, one that is there twice, a value that cannot be read."""
    by_name = {name.lower(): option for option in table for name in option.names()}
    values = {option.name: option.default for option in table}
    told: dict[str, str] = {}
    for name, text in given.items():
        option = by_name.get(name.lower())
        if option is None:
            if name.lower() in _SPARKS_OWN:
                continue
            known = [name for option in table for name in option.names()]
            raise BadOption(
                f"there is no option {name!r}{suggestion(name, known)}; "
                f"there are {', '.join(option.name for option in table)}"
            )
        if told.get(option.name, text) != text:
            raise BadOption(f"option {option.name} is there twice, with different values")
        told[option.name] = text
        values[option.name] = _read(option, name, text)
    return Chosen(values, frozenset(told))


def _read(option: Option[T], name: str, text: str) -> T:
    try:
        return option.read(text)
    except ValueError as error:
        shown = "" if option.is_secret else f" {text!r}"
        raise BadOption(f"option {option.name}{shown}: {error}") from error


# --- how a text is read --------------------------------------------------------------------------


def words(text: str) -> list[str]:
    """`a, b` as two; one at the least."""
    found = [word.strip() for word in text.split(",") if word.strip()]
    if not found:
        raise ValueError("a name is missing")
    return found


def yes_no(text: str) -> bool:
    if text.strip().lower() not in ("true", "false"):
        raise ValueError("true or false")
    return text.strip().lower() == "true"


def whole(at_least: int = 1, at_most: int = 2**62) -> Callable[[str], int]:
    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise ValueError("a whole number is wanted") from None
        if number < at_least:
            raise ValueError(f"it must be {at_least} at least")
        if number > at_most:
            raise ValueError(f"it must be {at_most} at most")
        return number

    return read


def one_of(*names: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        for name in names:
            if text.strip().lower() == name.lower():
                return name
        raise ValueError(f"one of {', '.join(names)}")

    return read


def full(text: str) -> str:
    if not text.strip():
        raise ValueError("it is empty")
    return text.strip()


# --- of both sides -------------------------------------------------------------------------------

SERVERS: Final = Option(
    "servers",
    full,
    "",
    "Name servers, `host:port`, with `;` between them.",
    ("nameServer", "namesrvAddr", "nameServers", "namesrv"),
)
ACCESS_KEY: Final = Option("accessKey", full, "", "ACL: who asks.")
SECRET_KEY: Final = Option("secretKey", full, "", "ACL: the secret of it.", is_secret=True)
SECURITY_TOKEN: Final = Option(
    "securityToken", full, "", "ACL: of a temporary access key.", is_secret=True
)
TLS: Final = Option("tls", yes_no, False, "Whether to speak TLS.", ("useTLS", "tlsEnable"))
TLS_CA: Final = Option("tlsCa", full, "", "File with the certificates to trust.")
TLS_CERT: Final = Option("tlsCert", full, "", "File with our own certificate.")
TLS_KEY: Final = Option("tlsKey", full, "", "File with the key of it.")
TLS_VERIFY: Final = Option("tlsVerify", yes_no, True, "Whether the server must prove itself.")
TIMEOUT_MS: Final = Option(
    "timeoutMs", whole(), 30_000, "How long an answer may take.", ("pullTimeoutMs",)
)

CONNECTION: Final[tuple[Option[Any], ...]] = (
    *(SERVERS, ACCESS_KEY, SECRET_KEY, SECURITY_TOKEN),
    *(TLS, TLS_CA, TLS_CERT, TLS_KEY, TLS_VERIFY, TIMEOUT_MS),
)
