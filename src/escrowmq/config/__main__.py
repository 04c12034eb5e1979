"""Write the tables of settings into docs/configuration.md: `python -m escrowmq.config [PAGE]`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Final

from escrowmq.config.loading import SETTINGS

MARKER: Final = "<!-- The rest of this page is generated: python -m escrowmq.config -->\n"


def with_tables(page: str) -> str:
    """Return the page with everything below the marker replaced by the tables."""
    text, marker, _ = page.partition(MARKER)
    if not marker:
        raise ValueError(f"the page has no line {MARKER.strip()}")
    return text + marker + "".join(f"{line}\n" for line in table_lines())


def table_lines() -> Iterator[str]:
    for group, members in groupby(SETTINGS, lambda setting: setting.group):
        yield ""
        yield f"### {group}"
        yield ""
        yield "| key | default | allowed | description | live | TOML, environment |"
        yield "|---|---|---|---|---|---|"
        for setting in members:
            text = setting.type.format(setting.default)
            cells = (
                f"`{setting.key}`",
                f"`{text}` {setting.unit}".rstrip() if text else "none",
                setting.type.allowed,
                setting.help,
                "yes" if setting.is_live else "",
                f"`{setting.name}`, `{setting.environment_variable}`",
            )
            yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/configuration.md")
    path.write_text(with_tables(path.read_text("utf-8")), "utf-8")
