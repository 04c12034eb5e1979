"""One request in: nothing, or a refusal.

In RocketMQ's order: who comes from a trusted address is let through; then the account must be
known, its signature right, and what the request needs granted. What was granted once is remembered
until the rules change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from escrowmq.auth.acl import AccessRules, Account, Permission
from escrowmq.auth.signature import ACCESS_KEY, has_valid_signature
from escrowmq.errors import AccessRefused
from escrowmq.remoting.codes import ResponseCode
from escrowmq.remoting.command import decode_command
from escrowmq.remoting.requests import Request
from escrowmq.secret import Secret

CACHE_MAX: Final = 10_000

RequiredPermissions = Callable[[Request[Any]], Iterable[Permission]]


class AccessValidator:
    def __init__(self, rules: AccessRules) -> None:
        self._rules = rules
        self._internal_accounts: dict[str, Account] = {}
        self._granted_cache: set[tuple[str, str, Permission]] = set()
        self._trusted_cache: dict[str, bool] = {}

    @property
    def accounts(self) -> Iterable[Account]:
        """Those of the file, as it is now."""
        return self._rules.accounts.values()

    def replace_rules(self, rules: AccessRules) -> None:
        """From the next request on."""
        self._rules = rules
        self._granted_cache.clear()
        self._trusted_cache.clear()

    def add_internal_account(self, account: Account) -> None:
        """One that is in no file: the brokers', towards the name server that they belong to."""
        self._internal_accounts[account.access_key] = account

    def check(
        self, request: Request[Any], peer: str, required_permissions: RequiredPermissions
    ) -> str:
        """The access key, which a trusted address need not have. Raises AccessRefused. `peer` is
        ip:port."""
        host = peer.rpartition(":")[0]
        if self._is_trusted(host):
            return ""
        ext_fields = decode_command(request.serializer, request.raw_header).ext_fields
        key = ext_fields.get(ACCESS_KEY, "")
        if not key:
            raise _access_refused("this broker wants requests with an access key and a signature")
        account = self._internal_accounts.get(key) or self._rules.accounts.get(key)
        if account is not None and account.is_enabled and host in account.trusted_addresses:
            return key
        if (
            account is None
            or not account.is_enabled
            or not _is_signed_by(ext_fields, request, account)
        ):
            # The same words for each: which keys there are is not for everybody.
            raise _access_refused(
                "the access key, or the signature made with its secret key, is wrong"
            )
        for need in required_permissions(request):
            self._require(account, need, host)
        return key

    def is_permitted(self, access_key: str, peer: str, permission: Permission) -> bool:
        """Whether who showed this key from there has this permission, by the rules of now."""
        host = peer.rpartition(":")[0]
        if self._is_trusted(host):
            return True
        account = self._rules.accounts.get(access_key)
        if account is None or not account.is_enabled:
            return False
        return host in account.trusted_addresses or account.allows(permission, host)

    def is_allowed_with_secret(
        self, access_key: str, secret_key: str, permission: Permission, peer_host: str
    ) -> bool:
        """For who shows his secret instead of a signature, as HTTP's Basic scheme does."""
        if self._is_trusted(peer_host):
            return True
        account = self._internal_accounts.get(access_key) or self._rules.accounts.get(access_key)
        if account is None or not account.is_enabled:
            return False
        return account.secret_key == Secret(secret_key) and account.allows(permission, peer_host)

    def _is_trusted(self, host: str) -> bool:
        known = self._trusted_cache.get(host)
        if known is None:
            if len(self._trusted_cache) >= CACHE_MAX:
                self._trusted_cache.clear()
            known = self._trusted_cache[host] = host in self._rules.trusted_addresses
        return known

    def _require(self, account: Account, permission: Permission, host: str) -> None:
        asked = (account.access_key, host, permission)
        if asked in self._granted_cache:
            return
        if not account.allows(permission, host):
            raise _access_refused(f"{account.access_key} has no permission: {permission}")
        if len(self._granted_cache) >= CACHE_MAX:
            self._granted_cache.clear()
        self._granted_cache.add(asked)


def _is_signed_by(ext_fields: dict[str, str], request: Request[Any], account: Account) -> bool:
    return has_valid_signature(ext_fields, request.body, account.secret_key.reveal().encode())


def _access_refused(reason: str) -> AccessRefused:
    return AccessRefused(ResponseCode.NO_PERMISSION, reason)
