"""Decide whether a request is allowed.

The checks are those of RocketMQ, in its order:

1. A request from a trusted address passes.
2. The access key must be that of an enabled account.
3. A request from an address that the account trusts passes.
4. The signature must be valid, and a strong one must not have been seen before.
5. The account must have every permission that the request requires.

Granted permissions are cached until the rules change, and a `GrantListener` can keep a copy of
them. Refusals are logged: the client of an application often shows a different error, so the log is
where an operator looks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol, TypeAlias

from escrowmq.auth import strong_signature
from escrowmq.auth.acl import AccessRules, Account, Permission
from escrowmq.auth.signature import ACCESS_KEY, has_valid_signature
from escrowmq.auth.strong_signature import (
    AGE_MAX_MS,
    ReplayGuard,
    has_valid_strong_signature,
    parse_signed_at,
)
from escrowmq.errors import AccessRefused
from escrowmq.remoting.codes import ResponseCode, request_name
from escrowmq.remoting.command import Command, decode_command
from escrowmq.remoting.requests import Request
from escrowmq.secret import Secret
from escrowmq.sliced_work import SlicedResult, run_to_end

log = logging.getLogger(__name__)

CACHE_MAX: Final = 10_000
_UNKNOWN_KEY_CHARS: Final = 4  # of an access key without account that a log line shows

RequiredPermissions: TypeAlias = Callable[[Request[Any]], Iterable[Permission]]


class GrantListener(Protocol):
    """Gets what a validator has granted, to allow equal requests without asking it again."""

    def host_trusted(self, host: str) -> None:
        """Requests from this host pass unchecked."""

    def permission_granted(self, account: Account, host: str, permission: Permission) -> None:
        """Requests from this host have a permission, if they have this account's signature.

        It is the signature of RocketMQ. A strong one has to be checked by the validator.
        """

    def grants_cleared(self) -> None:
        """Nothing that was reported before holds any more."""


class AccessValidator:
    def __init__(
        self, rules: AccessRules, *, strong_signature_only: bool = False, started_ms: int = 0
    ) -> None:
        """`started_ms`: when the server started, by the wall clock."""
        self._rules = rules
        self._strong_signature_only = strong_signature_only
        self._replay_guard = ReplayGuard(started_ms=started_ms)
        self._internal_accounts: dict[str, Account] = {}
        # By access key, host and permission. Reading every policy for each send would be slow.
        self._granted_cache: set[tuple[str, str, Permission]] = set()
        self._trusted_cache: dict[str, bool] = {}
        self._grant_listeners: list[GrantListener] = []
        self._refusal_log = RefusalLog()

    @property
    def accounts(self) -> Iterable[Account]:
        """The accounts of the ACL file as last loaded."""
        return self._rules.accounts.values()

    def replace_rules(self, rules: AccessRules) -> None:
        """Apply other rules from the next request on."""
        self._rules = rules
        self._clear_caches()

    def add_internal_account(self, account: Account) -> None:
        """Add an account that is in no file: brokers use it towards their own name server."""
        self._internal_accounts[account.access_key] = account
        self._clear_caches()

    def add_grant_listener(self, listener: GrantListener) -> None:
        """Report to a listener what is granted from now on, as long as it holds."""
        self._grant_listeners.append(listener)
        self._clear_caches()  # only what is not cached is reported

    def _clear_caches(self) -> None:
        self._granted_cache.clear()
        self._trusted_cache.clear()
        for listener in self._grant_listeners:
            listener.grants_cleared()

    def check(
        self,
        request: Request[Any],
        address: str,
        required_permissions: RequiredPermissions,
        *,
        now_ms: int,
        wall_ms: int | None = None,
    ) -> str:
        """Return the access key of an allowed request, or "" from a trusted address.

        `address` is the peer's ip:port. `wall_ms` is the time by the wall clock, which clients
        share, if it is not `now_ms`. `required_permissions` is called only after the signature
        was verified, because it may read the store. Raise AccessRefused.
        """
        return run_to_end(
            self.check_in_slices(
                request, address, required_permissions, now_ms=now_ms, wall_ms=wall_ms
            )
        )

    def check_in_slices(
        self,
        request: Request[Any],
        address: str,
        required_permissions: RequiredPermissions,
        *,
        now_ms: int,
        wall_ms: int | None = None,
    ) -> SlicedResult[str]:
        """Do the same in slices: a request may require a hundred thousand permissions."""
        host = address.rpartition(":")[0]
        if self._is_trusted(host):
            return ""
        command = decode_command(request.serializer, request.raw_header)
        access_key = command.ext_fields.get(ACCESS_KEY, "")
        try:
            account = self._verify_account(
                request, host, access_key, command, now_ms if wall_ms is None else wall_ms
            )
            if account is not None:
                for permission in required_permissions(request):
                    self._require(account, permission, host)
                    yield
        except _Refusal as refusal:
            self._refusal_log.add(
                address,
                self._printable_key(access_key),
                request.head.code,
                refusal.log_reason,
                now_ms=now_ms,
            )
            raise AccessRefused(ResponseCode.NO_PERMISSION, refusal.remark) from None
        return access_key

    def _verify_account(
        self, request: Request[Any], host: str, access_key: str, command: Command, now_ms: int
    ) -> Account | None:
        """Return the account that signed a request; None if it trusts the address."""
        if not access_key:
            raise _Refusal(
                "this server requires an access key and a signature; configure both in the client",
                "the request has no access key",
            )
        account = self._find_account(access_key)
        if account is not None and host in account.trusted_addresses:
            return None
        is_strong = strong_signature.SIGNATURE in command.ext_fields
        if self._strong_signature_only and not is_strong:
            raise _Refusal(
                "this server accepts only strong signatures; set strong_signature in the client",
                "the request has no strong signature (escrowStrongSignatureOnly)",
            )
        if account is None or not _is_signed_by(command, request.body, account):
            # The same text for both, so that it does not tell which access keys exist.
            raise _Refusal(
                "the access key or the signature is wrong; check both keys",
                "no enabled account has this access key"
                if account is None
                else "the signature is wrong; the client may have another secret key",
            )
        if is_strong:
            self._check_is_new(access_key, command, now_ms)
        return account

    def _check_is_new(self, access_key: str, command: Command, now_ms: int) -> None:
        """Refuse a request with a valid strong signature that is old or was received before."""
        guard = self._replay_guard
        signed_at = parse_signed_at(command.ext_fields.get(strong_signature.SIGNED, ""))
        if signed_at is None or not guard.is_fresh(signed_at, now_ms):
            reason = (
                "the request is too old or from the future; the clocks of client and server may "
                f"differ by {AGE_MAX_MS // 1000} s at most"
            )
            raise _Refusal(reason, reason)
        if not guard.accept(access_key, signed_at, now_ms):
            raise _Refusal("the request was sent before", "the request was sent before: a replay")

    def _printable_key(self, access_key: str) -> str:
        """Return an access key for the log: of an unknown one only the beginning.

        It may be a secret key, in a client whose two keys were exchanged.
        """
        if not access_key or self._find_account(access_key) is not None:
            return access_key
        return repr(access_key[:_UNKNOWN_KEY_CHARS])[1:-1] + "..."

    def is_permitted(self, access_key: str, address: str, permission: Permission) -> bool:
        """Return whether an account that was verified before has a permission by today's rules."""
        host = address.rpartition(":")[0]
        if self._is_trusted(host):
            return True
        account = self._rules.accounts.get(access_key)
        if account is None or not account.is_enabled:
            return False
        return host in account.trusted_addresses or account.allows(permission, host)

    def is_allowed_with_secret(
        self, access_key: str, secret_key: str, permission: Permission, peer_host: str
    ) -> bool:
        """Return whether a client that shows its secret, as in HTTP Basic, has a permission."""
        if self._is_trusted(peer_host):
            return True
        account = self._find_account(access_key)
        if account is None:
            return False
        return account.secret_key == Secret(secret_key) and account.allows(permission, peer_host)

    def _find_account(self, access_key: str) -> Account | None:
        account = self._internal_accounts.get(access_key) or self._rules.accounts.get(access_key)
        return account if account is not None and account.is_enabled else None

    def _is_trusted(self, host: str) -> bool:
        is_trusted = self._trusted_cache.get(host)
        if is_trusted is None:
            if len(self._trusted_cache) >= CACHE_MAX:
                self._clear_caches()
            is_trusted = self._trusted_cache[host] = host in self._rules.trusted_addresses
            if is_trusted:
                for listener in self._grant_listeners:
                    listener.host_trusted(host)
        return is_trusted

    def _require(self, account: Account, permission: Permission, host: str) -> None:
        key = account.access_key, host, permission
        if key in self._granted_cache:
            return
        if not account.allows(permission, host):
            reason = f"{account.access_key} has no permission: {permission}"
            remark = reason
            if permission.is_hidden:
                remark = f"{account.access_key} has no permission for this message"
            raise _Refusal(remark, reason)
        if len(self._granted_cache) >= CACHE_MAX:
            self._clear_caches()
        self._granted_cache.add(key)
        if not self._strong_signature_only:
            for listener in self._grant_listeners:
                listener.permission_granted(account, host, permission)


def _is_signed_by(command: Command, body: bytes | memoryview, account: Account) -> bool:
    secret_key = account.secret_key.reveal().encode()
    if strong_signature.SIGNATURE in command.ext_fields:
        return has_valid_strong_signature(command, body, secret_key)
    return has_valid_signature(command.ext_fields, body, secret_key)


class _Refusal(Exception):
    """A request is refused: the remark for the client, and the reason for the log."""

    def __init__(self, remark: str, log_reason: str) -> None:
        super().__init__(remark)
        self.remark = remark
        self.log_reason = log_reason


class RefusalLog:
    """Log refused requests without letting clients fill the log.

    In every minute there is one line for each host, access key and reason, and LINES_MAX lines
    altogether. The next line about the same says how many requests had none.
    """

    INTERVAL_MS: Final = 60_000
    LINES_MAX: Final = 50

    def __init__(self) -> None:
        self._interval_end_ms = 0
        # By host, access key and reason: refused requests that have no line.
        self._unlogged_counts: dict[tuple[str, str, str], int] = {}
        self._previous_counts: dict[tuple[str, str, str], int] = {}
        self._other_count = 0

    def add(
        self, address: str, access_key: str, request_code: int, reason: str, *, now_ms: int
    ) -> None:
        """Log a refused request, or count it."""
        if now_ms >= self._interval_end_ms:
            self._begin_interval(now_ms)
        key = address.rpartition(":")[0], access_key, reason
        if key in self._unlogged_counts:
            self._unlogged_counts[key] += 1
        elif len(self._unlogged_counts) >= self.LINES_MAX:
            self._other_count += 1
        else:
            self._unlogged_counts[key] = 0
            log.warning(
                "request refused peer=%s access_key=%s request=%s refused_before=%d: %s",
                address,
                access_key,
                request_name(request_code),
                self._previous_counts.pop(key, 0),
                reason,
            )

    def _begin_interval(self, now_ms: int) -> None:
        if self._other_count:
            log.warning("requests refused without a line of their own count=%d", self._other_count)
        self._interval_end_ms = now_ms + self.INTERVAL_MS
        self._previous_counts, self._unlogged_counts = self._unlogged_counts, {}
        self._other_count = 0
