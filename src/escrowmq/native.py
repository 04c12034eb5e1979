"""The native module `escrowmq_native`, if it is installed: the hot path of the broker, in Rust.

It is a distribution of its own, in the folder `native/`, and `escrowmq[fast]` asks for it.
Everything works without it, and then everything takes the Python path, which is the specification
of the native one. Which of them is used is decided here and nowhere else:

    ESCROWMQ_NATIVE=0            the Python path, even if the module is installed
    escrowNativeEnable=false     the same, as a setting of the broker
    not installed                the Python path
    another interface version    the Python path; the module belongs to another escrowmq
    otherwise                    the native path

`escrowmq doctor`, `broker status`, the metrics and the start-up line say which one is in use.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Final

# The interface between both distributions. It changes whenever one has to know of a change in the
# other, so that no combination of versions runs that was never tested.
INTERFACE_VERSION: Final = 4
SWITCH: Final = "ESCROWMQ_NATIVE"


@dataclass(frozen=True, slots=True)
class NativePath:
    """The native module; or None, and the reason why the Python path is used."""

    module: ModuleType | None
    reason: str = ""

    @property
    def description(self) -> str:
        """Return `native`, or `Python` with the reason."""
        return "native" if self.module is not None else f"Python ({self.reason})"


def load_native(
    environment: Mapping[str, str] = os.environ, *, is_enabled: bool = True
) -> NativePath:
    """Import the native module, if it is there and may be used."""
    if environment.get(SWITCH) == "0":
        return NativePath(None, f"{SWITCH}=0")
    if not is_enabled:
        return NativePath(None, "escrowNativeEnable=false")
    try:
        import escrowmq_native
    except ImportError:
        return NativePath(None, "the native module is not installed")
    version = getattr(escrowmq_native, "INTERFACE_VERSION", None)
    if version != INTERFACE_VERSION:
        return NativePath(
            None,
            f"the native module has interface version {version}, expected {INTERFACE_VERSION}; "
            "install the escrowmq-native that belongs to this escrowmq",
        )
    return NativePath(escrowmq_native)
