"""EscrowMQ's own signature of a request, which covers all of it and cannot be replayed.

    EscrowSigned      1,<time sent in ms>,<session>,<sequence number>
    EscrowSignature   Base64(HMAC-SHA256(secret key, content))
    content           code, flag, opaque, version, language, remark, every field but the signature
                      with its name, and the body; each text with its length before it

RocketMQ's signature (`signature.py`) covers the values of the fields and the body alone: a request
can get another code, text can move from one field to the next, and it can be sent again. Here a
session is one connection of a client, and its requests have increasing numbers. A number that was
seen is refused, and so is a request that is older than AGE_MAX_MS or than the server, which
remembers no numbers from before its start.

Only EscrowMQ's clients and servers know this signature. A server accepts both kinds unless
escrowStrongSignatureOnly is set.
"""

from __future__ import annotations

import hmac
import itertools
import struct
from binascii import b2a_base64
from collections.abc import Callable
from typing import Final, NamedTuple

from escrowmq.auth.signature import ACCESS_KEY, SECURITY_TOKEN
from escrowmq.remoting.command import Command
from escrowmq.secret import Secret

SIGNED: Final = "EscrowSigned"
SIGNATURE: Final = "EscrowSignature"
AGE_MAX_MS: Final = 300_000  # how far the clocks of client and server may differ
SESSIONS_MAX: Final = 100_000  # that a server remembers
WINDOW: Final = 1_024  # requests of a session may be handled in another order within this number

_VERSION: Final = "1"
_SESSION_LENGTH_MAX: Final = 64
_NUMBERS: Final = struct.Struct(">iiiiii")
_LENGTH: Final = struct.Struct(">q")
_WINDOW_MASK: Final = (1 << WINDOW) - 1


class SignedAt(NamedTuple):
    """The value of the field EscrowSigned: when a request was signed, and which one it is."""

    sent_ms: int
    session: str
    sequence: int

    def encode(self) -> str:
        return f"{_VERSION},{self.sent_ms},{self.session},{self.sequence}"


def parse_signed_at(text: str) -> SignedAt | None:
    """Return the parsed field; None if it is malformed or of another version."""
    version, *parts = text.split(",")
    if version != _VERSION or len(parts) != 3:
        return None
    sent_ms, session, sequence = parts
    is_number = sent_ms.isdecimal() and sequence.isdecimal() and len(sent_ms + sequence) < 36
    if not is_number or not session.isalnum() or len(session) > _SESSION_LENGTH_MAX:
        return None
    return SignedAt(int(sent_ms), session, int(sequence))


class StrongSigner:
    """Sign the requests that one account sends over one connection.

    `session` must differ from that of every other connection, `now_ms` reads the wall clock.
    """

    def __init__(
        self,
        access_key: str,
        secret_key: Secret,
        security_token: Secret,
        *,
        session: str,
        now_ms: Callable[[], int],
    ) -> None:
        self._access_key = access_key
        self._secret_key = secret_key.reveal().encode()
        self._security_token = security_token.reveal()
        self._session = session
        self._now_ms = now_ms
        self._sequence = itertools.count(1)

    def __call__(self, command: Command, body: bytes | memoryview) -> dict[str, str]:
        """Return the fields with the access key and the signature added."""
        signed_at = SignedAt(self._now_ms(), self._session, next(self._sequence))
        fields = {
            **command.ext_fields,
            ACCESS_KEY: self._access_key,
            SIGNED: signed_at.encode(),
        }
        if self._security_token:
            fields[SECURITY_TOKEN] = self._security_token
        fields.pop(SIGNATURE, None)
        signature = compute_strong_signature(command, fields, body, self._secret_key)
        return {**fields, SIGNATURE: signature.decode()}


def has_valid_strong_signature(
    command: Command, body: bytes | memoryview, secret_key: bytes
) -> bool:
    """Return whether a request carries the signature that this key produces."""
    fields = dict(command.ext_fields)
    signature = fields.pop(SIGNATURE, "").encode()
    return hmac.compare_digest(
        signature, compute_strong_signature(command, fields, body, secret_key)
    )


def compute_strong_signature(
    command: Command, fields: dict[str, str], body: bytes | memoryview, secret_key: bytes
) -> bytes:
    """Return the signature of a request with these fields, which must not contain it."""
    pieces = [
        _NUMBERS.pack(
            command.code,
            command.flag,
            command.opaque,
            command.version,
            command.language,
            # Empty values are left out: one of the two header encodings cannot express them.
            sum(1 for value in fields.values() if value),
        )
    ]
    texts = [command.remark]
    for name in sorted(fields):
        if fields[name]:
            texts += (name, fields[name])
    for text in texts:
        encoded = text.encode()
        pieces += (_LENGTH.pack(len(encoded)), encoded)
    pieces.append(_LENGTH.pack(len(body)))
    digest = hmac.new(secret_key, b"".join(pieces), "sha256")
    digest.update(body)
    return b2a_base64(digest.digest(), newline=False)


class ReplayGuard:
    """Remembers which requests of each session were received."""

    def __init__(self, *, started_ms: int = 0) -> None:
        """`started_ms`: when the server started, by the wall clock."""
        self._started_ms = started_ms
        # By access key and session, the last used at the end: highest number, those below it that
        # were seen as bits, and when the last one came.
        self._sessions: dict[tuple[str, str], tuple[int, int, int]] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def is_fresh(self, signed_at: SignedAt, now_ms: int) -> bool:
        """Return whether a request is neither too old nor from the future."""
        oldest_ms = max(now_ms - AGE_MAX_MS, self._started_ms)
        return oldest_ms <= signed_at.sent_ms <= now_ms + AGE_MAX_MS

    def accept(self, access_key: str, signed_at: SignedAt, now_ms: int) -> bool:
        """Record a request with a valid signature; return False if it was received before."""
        key = access_key, signed_at.session
        highest, seen, _ = self._sessions.pop(key, (0, 0, 0))
        behind = highest - signed_at.sequence
        is_new = behind < 0 or (behind < WINDOW and not seen >> behind & 1)
        if behind < 0:
            highest, seen = signed_at.sequence, 1 if -behind >= WINDOW else seen << -behind | 1
            seen &= _WINDOW_MASK
        elif is_new:
            seen |= 1 << behind
        self._sessions[key] = highest, seen, now_ms
        if len(self._sessions) > SESSIONS_MAX:
            self._purge(now_ms)
        return is_new

    def _purge(self, now_ms: int) -> None:
        """Forget sessions whose requests are too old by now, and the oldest if there are too many.

        A request can be signed AGE_MAX_MS ahead of the server's clock, so it stays valid for twice
        that time.
        """
        for key, (_, _, last_ms) in list(self._sessions.items()):
            if now_ms - last_ms <= 2 * AGE_MAX_MS and len(self._sessions) <= SESSIONS_MAX:
                break
            del self._sessions[key]
