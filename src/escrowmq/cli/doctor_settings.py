"""What may be wrong with the settings of a server."""

from __future__ import annotations

import resource
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from escrowmq.cli.checkup import Checkup, ok, problem, warning
from escrowmq.config import Config, Resolved
from escrowmq.config.resolve import is_loopback
from escrowmq.errors import EscrowError

_OWN_FILES: Final = 200  # beside connections


def examine_settings(resolved: Resolved) -> Iterator[Checkup]:
    config = resolved.config
    for text in resolved.warnings:
        yield warning("settings", text, "escrowmq config shows every setting and where it is from")
    if not resolved.warnings:
        changed = sum(entry.is_changed for entry in resolved.entries())
        yield ok("settings", f"{changed} not at their defaults")
    yield _doors(config)
    if config.security.acl_file is not None and config.security.checks_access:
        yield _accounts(config.security.acl_file)
    yield _files(config)


def _doors(config: Config) -> Checkup:
    address = config.network.bind_address
    if is_loopback(address):
        return ok("access", f"serves this machine alone ({address})")
    if config.security.checks_access:
        if config.security.has_tls:
            return ok("access", f"{address}, with accounts and TLS")
        return warning(
            "access",
            f"{address}, with accounts but without TLS: who reads the wire reads messages",
            "set tls.server.certPath and tls.server.keyPath (docs/security.md)",
        )
    remedy = "set aclEnable=true and escrowAclFile (docs/security.md), or listen on 127.0.0.1"
    if config.security.insecure:
        text = f"{address} is open to every machine that reaches it, as escrowInsecure says"
        return warning("access", text, remedy)
    return problem("access", f"{address} without accounts: serve refuses to start", remedy)


def _accounts(file: Path) -> Checkup:
    # Not before: it brings the server along, which is not looked at otherwise.
    from escrowmq.server.access import rules_of

    try:
        rules = rules_of(file)
        mode = file.stat().st_mode
    except (EscrowError, OSError) as error:
        return problem("accounts", str(error), "mend the file (docs/security.md, Accounts)")
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        return warning("accounts", f"{file} can be read by others", f"chmod 600 {file}")
    return ok("accounts", f"{len(rules.accounts)} in {file}")


def _files(config: Config) -> Checkup:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = config.network.connections_max + _OWN_FILES
    if hard != resource.RLIM_INFINITY and hard < wanted:
        return warning(
            "open files",
            f"{hard} may be open, and escrowConnectionsMax={config.network.connections_max}",
            f"ulimit -Hn {wanted}, or LimitNOFILE={wanted} in the unit",
        )
    return ok("open files", "enough for escrowConnectionsMax")
