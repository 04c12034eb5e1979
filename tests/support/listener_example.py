"""What the listener examples, in Python and Java, must print, and the settings that they need."""

from __future__ import annotations

from pathlib import Path
from typing import Final

EXAMPLES: Final = Path(__file__).parents[2] / "examples"

# The settings that the examples' page recommends, by RocketMQ's names.
SHORT_CHECKS: Final = dict(
    line.split("=")
    for line in (EXAMPLES / "short_checks.conf").read_text().splitlines()
    if not line.startswith("#")
)

RESULTS: Final = [
    "key   tag   check     result",
    "KEY0  TagA  UNKNOWN   stranded",
    "KEY1  TagB  COMMIT    delivered",
    "KEY2  TagC  ROLLBACK  rolled back",
    "KEY3  TagD  UNKNOWN   stranded",
    "KEY4  TagE  COMMIT    delivered",
    "KEY5  TagA  ROLLBACK  rolled back",
    "KEY6  TagB  UNKNOWN   stranded",
    "KEY7  TagC  COMMIT    delivered",
    "KEY8  TagD  ROLLBACK  rolled back",
    "KEY9  TagE  UNKNOWN   stranded",
]
