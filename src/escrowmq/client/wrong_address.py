"""Explain why no name server or broker answers at an address.

Used by the connections of both kinds, so nothing here needs an event loop.
"""

from __future__ import annotations

import socket
import ssl
from typing import Final

from escrowmq.remoting.codes import RequestCode, request_name
from escrowmq.remoting.foreign_protocols import foreign_protocol

# Requests of clients that name servers answer, and brokers do not.
_NAME_SERVER_REQUESTS: Final = frozenset(
    (
        RequestCode.GET_ROUTEINFO_BY_TOPIC,
        RequestCode.GET_BROKER_CLUSTER_INFO,
        RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER,
        RequestCode.GET_TOPICS_BY_CLUSTER,
        RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS,
    )
)


def describe_connect_error(
    address: str, error: BaseException, *, timeout_s: float, has_tls: bool
) -> str:
    """Return why there is no connection to an address, and what to look at."""
    return f"{address} cannot be reached: {_connect_error_text(error, timeout_s, has_tls)}"


def _connect_error_text(error: BaseException, timeout_s: float, has_tls: bool) -> str:
    if _is_refused(error):
        return "nothing listens there; is `escrowmq serve` running, and is this its address?"
    if isinstance(error, TimeoutError):
        return f"no answer in {timeout_s:g} s; check the address, and firewalls on the way"
    if isinstance(error, socket.gaierror):
        return f"the name of the host is not known ({error.strerror})"
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"certificate verify failed: {error.verify_message}; give the certificate of its "
            "authority as Access(ca_file=…)"
        )
    if has_tls and isinstance(
        error, (ssl.SSLError, ConnectionResetError, ConnectionAbortedError, BrokenPipeError)
    ):
        reason = getattr(error, "reason", None) or str(error) or type(error).__name__
        return f"the TLS handshake failed ({reason}); does this port have TLS?"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _is_refused(error: BaseException) -> bool:
    # A name with an IPv4 and an IPv6 address gets one error for both, of which only the text says
    # what happened.
    return isinstance(error, ConnectionRefusedError) or "Connect call failed" in str(error)


def describe_strange_server(first_bytes: bytes | bytearray) -> str:
    """Return what to look at if a server closes a connection, or violates the protocol, before it
    has sent one valid response. `first_bytes` is the beginning of what it has sent."""
    if not first_bytes:
        return "is it a name server or broker, and does its port require TLS, Access(tls=True)?"
    protocol = foreign_protocol(first_bytes)
    if protocol == "TLS":
        return "its answer looks like TLS: give access=Access(tls=True)"
    if protocol:
        return f"its answer looks like {protocol}; is this the port of a name server or broker?"
    return "its answer is not RocketMQ's remoting protocol; is this the port of a name server?"


def describe_unknown_request(address: str, code: int) -> str:
    """Return why a server may have answered that it does not know a request."""
    name = request_name(code)
    if code in _NAME_SERVER_REQUESTS:
        return (
            f"{address} is no name server: it does not know {name}; if this is the port of a "
            "broker, give that of its name server, by default 9876"
        )
    return (
        f"{address} does not support {name}: it is not an EscrowMQ broker, or an older one; Apache "
        "RocketMQ has no such request, and neither has a name server"
    )
