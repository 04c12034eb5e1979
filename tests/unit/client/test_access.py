"""Credentials and TLS settings of a client."""

from __future__ import annotations

import pickle
import ssl
from pathlib import Path

import pytest

from escrowmq import Access
from escrowmq.errors import ConfigError
from escrowmq.remoting.command import Command
from tests.support.signing import Certificates


def test_an_access_with_file_names_can_be_pickled() -> None:
    access = Access("key", "secret", "token", tls=True, ca_file="/ca.pem", verify_server=False)
    copy = pickle.loads(pickle.dumps(access))
    assert copy == access
    assert hash(copy) == hash(access)
    assert copy.secret_key.reveal() == "secret"


def test_requests_are_signed_only_with_an_account() -> None:
    assert Access().signer() is None
    sign = Access("key", "secret").signer()
    assert sign is not None
    assert sign(Command(code=10, opaque=1, ext_fields={"a": "1"}), b"")["AccessKey"] == "key"


def test_the_tls_context_trusts_the_ca_file(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    access = Access(tls=True, ca_file=str(certificates.ca))
    context = access.ssl_context()
    assert context is not None
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert [ca["subject"] for ca in context.get_ca_certs()]


def test_verify_server_false_accepts_any_certificate() -> None:
    context = Access(tls=True, verify_server=False).ssl_context()
    assert context is not None
    assert context.verify_mode is ssl.CERT_NONE
    assert not context.check_hostname


def test_an_ssl_context_of_the_user_is_used_unchanged() -> None:
    context = ssl.create_default_context()
    assert Access(tls=context).ssl_context() is context
    assert Access().ssl_context() is None


def test_a_missing_file_is_reported_by_name(tmp_path: Path) -> None:
    access = Access(tls=True, ca_file=str(tmp_path / "missing.pem"))
    with pytest.raises(ConfigError, match=r"missing\.pem"):
        access.ssl_context()


@pytest.mark.parametrize(
    "arguments",
    [
        {"access_key": "key"},
        {"secret_key": "secret"},
        {"ca_file": "/ca.pem"},
        {"tls": True, "key_file": "/key.pem"},
    ],
)
def test_incomplete_settings_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"key|tls"):
        Access(**arguments)  # type: ignore[arg-type]  # each is a wrong combination
