"""Who a command is, towards brokers and name servers: options, environment, a file.

Commands take the options with `@access_options`; whatever opens a connection asks `current_access`.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click
import yaml

from escrowmq.client.access import Access
from escrowmq.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])

_META_KEY: Final = "escrowmq.access"
ACCESS_KEY_VARIABLE: Final = "ESCROWMQ_ACCESS_KEY"
SECRET_KEY_VARIABLE: Final = "ESCROWMQ_SECRET_KEY"
SECURITY_TOKEN_VARIABLE: Final = "ESCROWMQ_SECURITY_TOKEN"
CREDENTIALS_VARIABLE: Final = "ESCROWMQ_CREDENTIALS"
TLS_VARIABLE: Final = "ESCROWMQ_TLS"
TLS_CA_VARIABLE: Final = "ESCROWMQ_TLS_CA"


def _store_option(context: click.Context, param: click.Parameter, value: object) -> None:
    if value is not None and param.name is not None:
        context.meta.setdefault(_META_KEY, {})[param.name] = value


def _option(*names: str, help: str, **options: Any) -> Callable[[F], F]:
    return click.option(*names, callback=_store_option, expose_value=False, help=help, **options)


def access_options(command: F) -> F:
    """--access-key and its kin, on a command that talks to a cluster."""
    for option in reversed(
        (
            _option(
                "--access-key",
                metavar="KEY",
                help=f"The account to sign with.  [${ACCESS_KEY_VARIABLE}]",
            ),
            _option(
                "--secret-key",
                metavar="KEY",
                help=(
                    f"Its secret. Others can see a command line: rather set ${SECRET_KEY_VARIABLE}."
                ),
            ),
            _option(
                "--credentials",
                metavar="FILE",
                help=f"A file with both, like RocketMQ's tools.yml.  [${CREDENTIALS_VARIABLE}]",
            ),
            _option("--tls", is_flag=True, default=None, help=f"Speak TLS.  [${TLS_VARIABLE}=1]"),
            _option(
                "--tls-ca",
                metavar="FILE",
                help=f"Whose certificates to believe.  [${TLS_CA_VARIABLE}]",
            ),
        )
    ):
        command = option(command)
    return command


def current_access() -> Access:
    """Of the command that runs: its options, then the environment."""
    context = click.get_current_context(silent=True)
    told: dict[str, Any] = {} if context is None else context.meta.get(_META_KEY, {})
    environment = os.environ
    key = told.get("access_key") or environment.get(ACCESS_KEY_VARIABLE, "")
    secret = told.get("secret_key") or environment.get(SECRET_KEY_VARIABLE, "")
    token = environment.get(SECURITY_TOKEN_VARIABLE, "")
    file = told.get("credentials") or environment.get(CREDENTIALS_VARIABLE, "")
    if file and not (key and secret):
        key, secret, token = _read_credentials(Path(file))
    if bool(key) != bool(secret):
        raise ConfigError(
            f"an access key and its secret key belong together: --access-key and "
            f"${SECRET_KEY_VARIABLE}, or --credentials FILE"
        )
    ca = told.get("tls_ca") or environment.get(TLS_CA_VARIABLE, "")
    wanted = bool(
        told.get("tls") or ca or environment.get(TLS_VARIABLE, "") not in ("", "0", "false")
    )
    return Access(key, secret, token, tls=_tls_context(ca) if wanted else False)


def _read_credentials(file: Path) -> tuple[str, str, str]:
    """No message repeats what is in it."""
    try:
        content = yaml.load(file.read_text(), Loader=yaml.BaseLoader)
        key, secret = content["accessKey"], content["secretKey"]
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{file}: must have the lines accessKey: ... and secretKey: ..."
        ) from None
    token = content.get("securityToken") or ""
    if not all(isinstance(text, str) for text in (key, secret, token)):
        raise ConfigError(f"{file}: accessKey and secretKey must be texts")
    return key, secret, token


def _tls_context(ca_file: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file or None)
    except OSError as error:
        raise ConfigError(f"{ca_file}: no certificates: {error.strerror or error}") from None
