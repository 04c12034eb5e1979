"""Options that several commands share, the values they take, and completion of names.

`cluster_options` opens the cluster: a command with it receives `cluster` and `as_json` instead of
the options themselves. Credentials are never parameters of a command; `current_access` reads them
from the running command and the environment.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import reduce, wraps
from pathlib import Path
from typing import Any, Final, TypeVar

import click
import yaml
from click.shell_completion import CompletionItem

from escrowmq.admin.cluster import Cluster
from escrowmq.admin.offsets import EARLIEST, LATEST, StartPosition
from escrowmq.admin.queries import group_configs
from escrowmq.client.access import Access
from escrowmq.client.sync_connection import DEFAULT_TIMEOUT_S
from escrowmq.clock import Timestamp, epoch_ms
from escrowmq.errors import ConfigError, EscrowError
from escrowmq.parsing import parse_duration_ms, parse_timestamp

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_NAMESRV: Final = "127.0.0.1:9876"


def combine_options(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Return one decorator for several options, which `--help` lists in this order."""
    return lambda command: reduce(lambda inner, option: option(inner), reversed(options), command)


# --- values --------------------------------------------------------------------------------------


def parse_duration_option(
    context: click.Context, param: click.Parameter, value: str | None
) -> int | None:
    """Return milliseconds. A number without a unit is in seconds."""
    if value is None:
        return None
    try:
        return parse_duration_ms(value, default_unit="s")
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def parse_time_option(
    context: click.Context, param: click.Parameter, value: str | None
) -> int | None:
    """Return milliseconds since 1970."""
    return None if value is None else epoch_ms(_parse_timestamp(value))


def parse_timestamp_option(
    context: click.Context, param: click.Parameter, value: str | None
) -> Timestamp | None:
    return None if value is None else _parse_timestamp(value)


def parse_start_option(
    context: click.Context, param: click.Parameter, value: str | None
) -> StartPosition | None:
    """Return EARLIEST, LATEST, or milliseconds since 1970."""
    if value is None or value in (EARLIEST, LATEST):
        return value
    return epoch_ms(_parse_timestamp(value, f"; {EARLIEST} and {LATEST} are also allowed"))


def _parse_timestamp(value: str, hint: str = "") -> Timestamp:
    try:
        return parse_timestamp(value)
    except ValueError as error:
        raise click.BadParameter(f"{error}{hint}") from None


def parse_pair(option: str, text: str, *, allow_empty: bool = False) -> tuple[str, str]:
    """Split NAME=VALUE. Raises UsageError that names the option."""
    name, equals, value = text.partition("=")
    if not name.strip() or not equals or not (value or allow_empty):
        raise click.UsageError(f"{option} {text!r} is not NAME=VALUE")
    return name.strip(), value


def parse_pairs_option(
    context: click.Context, param: click.Parameter, values: Sequence[str]
) -> dict[str, str]:
    """Return the pairs of an option that is repeated, NAME=VALUE each."""
    return dict(parse_pair(param.opts[-1], value) for value in values)


# --- credentials and TLS -------------------------------------------------------------------------

ACCESS_KEY_VARIABLE: Final = "ESCROWMQ_ACCESS_KEY"
SECRET_KEY_VARIABLE: Final = "ESCROWMQ_SECRET_KEY"
SECURITY_TOKEN_VARIABLE: Final = "ESCROWMQ_SECURITY_TOKEN"
CREDENTIALS_VARIABLE: Final = "ESCROWMQ_CREDENTIALS"
STRONG_SIGNATURE_VARIABLE: Final = "ESCROWMQ_STRONG_SIGNATURE"
TLS_VARIABLE: Final = "ESCROWMQ_TLS"
TLS_CA_VARIABLE: Final = "ESCROWMQ_TLS_CA"
_META_KEY: Final = "escrowmq.access"


def _store_access_option(context: click.Context, param: click.Parameter, value: object) -> None:
    if value is not None and param.name is not None:
        context.meta.setdefault(_META_KEY, {})[param.name] = value


def _access_option(*names: str, **options: Any) -> Callable[[F], F]:
    return click.option(*names, callback=_store_access_option, expose_value=False, **options)


access_options = combine_options(
    _access_option(
        "--access-key",
        metavar="KEY",
        help=f"The account that signs the requests.  [${ACCESS_KEY_VARIABLE}]",
    ),
    _access_option(
        "--secret-key",
        metavar="KEY",
        help="The secret key of the account. Other users of this machine can see it on the "
        f"command line; ${SECRET_KEY_VARIABLE} is safer.",
    ),
    _access_option(
        "--credentials",
        metavar="FILE",
        help=f"A YAML file with both keys, like RocketMQ's tools.yml.  [${CREDENTIALS_VARIABLE}]",
    ),
    _access_option(
        "--strong-signature",
        is_flag=True,
        default=None,
        help="Sign with EscrowMQ's own signature, which RocketMQ does not know.  "
        f"[${STRONG_SIGNATURE_VARIABLE}=1]",
    ),
    _access_option(
        "--tls", is_flag=True, default=None, help=f"Connect with TLS.  [${TLS_VARIABLE}=1]"
    ),
    _access_option(
        "--tls-ca",
        metavar="FILE",
        help="Trust the certificate authorities in this PEM file; implies --tls.  "
        f"[${TLS_CA_VARIABLE}]",
    ),
)


def current_access() -> Access:
    """Return the credentials of the running command: its options, then the environment.

    Raises ConfigError if a key or a file is missing.
    """
    context = click.get_current_context(silent=True)
    options: dict[str, Any] = {} if context is None else context.meta.get(_META_KEY, {})
    environment = os.environ
    access_key = options.get("access_key") or environment.get(ACCESS_KEY_VARIABLE, "")
    secret_key = options.get("secret_key") or environment.get(SECRET_KEY_VARIABLE, "")
    security_token = environment.get(SECURITY_TOKEN_VARIABLE, "")
    file = options.get("credentials") or environment.get(CREDENTIALS_VARIABLE, "")
    if file and not (access_key and secret_key):
        access_key, secret_key, security_token = _read_credentials(Path(file))
    if bool(access_key) != bool(secret_key):
        raise ConfigError(
            "an access key and its secret key belong together: give --access-key and "
            f"${SECRET_KEY_VARIABLE}, or --credentials FILE"
        )
    ca_file = options.get("tls_ca") or environment.get(TLS_CA_VARIABLE, "")
    has_tls = bool(options.get("tls") or ca_file or _is_set(TLS_VARIABLE))
    is_strong = bool(options.get("strong_signature") or _is_set(STRONG_SIGNATURE_VARIABLE))
    if is_strong and not access_key:
        raise ConfigError("--strong-signature needs an account: give --access-key or --credentials")
    return Access(
        access_key,
        secret_key,
        security_token,
        tls=has_tls,
        ca_file=ca_file,
        strong_signature=is_strong,
    )


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "") not in ("", "0", "false")


def _read_credentials(file: Path) -> tuple[str, str, str]:
    """Return access key, secret key and security token. No error repeats the content."""
    try:
        content = yaml.load(file.read_text(), Loader=yaml.BaseLoader)
        access_key, secret_key = content["accessKey"], content["secretKey"]
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{file}: must have the lines accessKey: ... and secretKey: ..."
        ) from None
    security_token = content.get("securityToken") or ""
    if not all(isinstance(text, str) for text in (access_key, secret_key, security_token)):
        raise ConfigError(f"{file}: accessKey and secretKey must be plain texts")
    return access_key, secret_key, security_token


# --- names that the shell completes --------------------------------------------------------------

# The user waits after pressing Tab: give up quickly, and complete nothing instead of failing.
_COMPLETION_TIMEOUT_S: Final = 1.0

ShellComplete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def _make_completion(fetch_names: Callable[[Cluster], Iterable[str]]) -> ShellComplete:
    def complete(
        context: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        namesrv = context.params.get("namesrv") or DEFAULT_NAMESRV
        try:
            with context.scope(cleanup=False):  # current_access looks into the context
                access = current_access()
            with Cluster(namesrv, access, timeout_s=_COMPLETION_TIMEOUT_S) as cluster:
                names = fetch_names(cluster)
        except (EscrowError, ValueError):
            return []
        return [CompletionItem(name) for name in sorted(names) if name.startswith(incomplete)]

    return complete


def _fetch_topic_names(cluster: Cluster) -> list[str]:
    return [name for name in cluster.topics() if "%" not in name]


def _fetch_group_names(cluster: Cluster) -> set[str]:
    return {name for _, configs in cluster.ask_all(group_configs) for name in configs}


def _fetch_broker_names(cluster: Cluster) -> list[str]:
    return [broker.name for broker in cluster.brokers()]


complete_topic = _make_completion(_fetch_topic_names)
complete_group = _make_completion(_fetch_group_names)
complete_broker = _make_completion(_fetch_broker_names)


# --- options of many commands --------------------------------------------------------------------

config_file_option: Final = click.option(
    "-c",
    "config_file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Configuration file, broker.conf or TOML.",
)
NAMESRV_HELP: Final = "Name servers of the cluster, HOST:PORT, separated by `;` or `,`."
namesrv_option: Final = click.option(
    *("-n", "--namesrv"),
    default=DEFAULT_NAMESRV,
    envvar="NAMESRV_ADDR",
    show_default=True,
    show_envvar=True,
    metavar="ADDR",
    help=NAMESRV_HELP,
)
json_option: Final = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON instead of text."
)
_broker_option: Final = click.option(
    "--broker",
    metavar="ADDR|NAME",
    help="Use only this broker. With HOST:PORT no name server is asked.",
    shell_complete=complete_broker,
)
watch_option: Final = click.option(
    "--watch",
    "interval_s",
    type=click.FloatRange(min=0.1),
    is_flag=False,
    flag_value=2.0,
    metavar="[SECONDS]",
    help="Repeat until Ctrl-C.  [every 2 seconds]",
)
dry_run_option: Final = click.option(
    "--dry-run", is_flag=True, help="Show what would be done, and change nothing."
)
yes_option: Final = click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
confirm_options = combine_options(dry_run_option, yes_option)


def open_cluster(
    namesrv: str, broker: str | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S
) -> Cluster:
    """Return a cluster that is closed when the running command ends. Raises BadParameter."""
    try:
        cluster = Cluster(namesrv, current_access(), broker=broker, timeout_s=timeout_s)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="-n") from None
    return click.get_current_context().with_resource(cluster)


def cluster_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of a command that talks to brokers: it receives `cluster` and `as_json`."""

    @namesrv_option
    @_broker_option
    @json_option
    @access_options
    @wraps(command)
    def run(*args: Any, namesrv: str, broker: str | None, **options: Any) -> None:
        command(*args, cluster=open_cluster(namesrv, broker), **options)

    return run


def confirm(question: str, *, yes: bool) -> None:
    """Ask on the terminal, unless `yes`. Raises Abort on "no", UsageError without a terminal."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(
            "this needs a confirmation, and standard input is not a terminal: use --yes to do it "
            "without asking, or --dry-run to see what would be done"
        )
    if not click.confirm(question, err=True):
        click.echo("Nothing was changed.", err=True)
        raise click.Abort
