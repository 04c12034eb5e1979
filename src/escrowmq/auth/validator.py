"""One request in: nothing, or a refusal.

In RocketMQ's order: who comes from a trusted address is let through; then the account must be
known, its signature right, and what the request needs granted. What was granted once is remembered
until the rules change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from escrowmq.auth.acl import Account, Need, Rules
from escrowmq.auth.signature import ACCESS_KEY, fits
from escrowmq.errors import AccessRefused
from escrowmq.remoting.codes import ResponseCode
from escrowmq.remoting.command import decode_command
from escrowmq.remoting.requests import Request
from escrowmq.secret import Secret

REMEMBERED_MAX: Final = 10_000

Needs = Callable[[Request[Any]], Iterable[Need]]


class Guard:
    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._own: dict[str, Account] = {}
        self._granted: set[tuple[str, str, Need]] = set()
        self._trusted: dict[str, bool] = {}

    @property
    def accounts(self) -> Iterable[Account]:
        """Those of the file, as it is now."""
        return self._rules.accounts.values()

    def renew(self, rules: Rules) -> None:
        """From the next request on."""
        self._rules = rules
        self._granted.clear()
        self._trusted.clear()

    def add_own(self, account: Account) -> None:
        """One that is in no file: the brokers', towards the name server that they belong to."""
        self._own[account.access_key] = account

    def check(self, request: Request[Any], peer: str, needs: Needs) -> str:
        """The access key, which a trusted address need not have. Raises AccessRefused. `peer` is
        ip:port."""
        host = peer.rpartition(":")[0]
        if self._is_trusted(host):
            return ""
        ext_fields = decode_command(request.serializer, request.header).ext_fields
        key = ext_fields.get(ACCESS_KEY, "")
        if not key:
            raise _refusal("this broker wants requests with an access key and a signature")
        account = self._own.get(key) or self._rules.accounts.get(key)
        if account is not None and account.is_enabled and host in account.trusted_addresses:
            return key
        if account is None or not account.is_enabled or not _signed(ext_fields, request, account):
            # The same words for each: which keys there are is not for everybody.
            raise _refusal("the access key, or the signature made with its secret key, is wrong")
        for need in needs(request):
            self._require(account, need, host)
        return key

    def may(self, access_key: str, peer: str, need: Need) -> bool:
        """Whether who showed this key from there has this permission, by the rules of now."""
        host = peer.rpartition(":")[0]
        if self._is_trusted(host):
            return True
        account = self._rules.accounts.get(access_key)
        if account is None or not account.is_enabled:
            return False
        return host in account.trusted_addresses or account.allows(need, host)

    def allows(self, access_key: str, secret_key: str, need: Need, peer_host: str) -> bool:
        """For who shows his secret instead of a signature, as HTTP's Basic scheme does."""
        if self._is_trusted(peer_host):
            return True
        account = self._own.get(access_key) or self._rules.accounts.get(access_key)
        if account is None or not account.is_enabled:
            return False
        return account.secret_key == Secret(secret_key) and account.allows(need, peer_host)

    def _is_trusted(self, host: str) -> bool:
        known = self._trusted.get(host)
        if known is None:
            if len(self._trusted) >= REMEMBERED_MAX:
                self._trusted.clear()
            known = self._trusted[host] = host in self._rules.trusted_addresses
        return known

    def _require(self, account: Account, need: Need, host: str) -> None:
        asked = (account.access_key, host, need)
        if asked in self._granted:
            return
        if not account.allows(need, host):
            raise _refusal(f"{account.access_key} has no permission: {need}")
        if len(self._granted) >= REMEMBERED_MAX:
            self._granted.clear()
        self._granted.add(asked)


def _signed(ext_fields: dict[str, str], request: Request[Any], account: Account) -> bool:
    return fits(ext_fields, request.body, account.secret_key.reveal().encode())


def _refusal(why: str) -> AccessRefused:
    return AccessRefused(ResponseCode.NO_PERMISSION, why)
