"""Write the generated parts of this directory: `make docs`.

    api.md              every public class and function, from its docstring
    configuration.md    every setting, as declared in escrowmq/config/settings.py
    metrics.md          every metric, as declared beside its collectors

Everything below the marker of a page is generated. A test compares the pages with the declarations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import escrowmq.broker.metrics
import escrowmq.server.metrics
import escrowmq.server.supervisor
from docs.api_reference import api_sections
from escrowmq.config.loading import SETTINGS
from escrowmq.metrics import Family

DOCS: Final = Path(__file__).parent
MARKER: Final = "<!-- The rest of this page is generated: make docs -->\n"
METRIC_MODULES: Final = {
    "Broker": escrowmq.broker.metrics,
    "Server": escrowmq.server.metrics,
    "Supervisor (`serve --brokers N`)": escrowmq.server.supervisor,
}


def declared_families(module: ModuleType) -> list[Family[Any]]:
    """Return the metrics that a module declares, in their order."""
    return [value for value in vars(module).values() if isinstance(value, Family)]


def generate(page: str, sections: Iterable[str]) -> str:
    """Return the page with everything below the marker replaced by the sections."""
    text, marker, _ = page.partition(MARKER)
    if not marker:
        raise ValueError(f"the page has no line {MARKER.strip()}")
    return text + marker + "".join(f"\n{section}" for section in sections)


def setting_sections() -> Iterator[str]:
    columns = ("key", "default", "allowed", "description", "live", "TOML, environment")
    for group, settings in groupby(SETTINGS, lambda setting: setting.group):
        rows = []
        for setting in settings:
            default = setting.type.format(setting.default)
            rows.append(
                (
                    f"`{setting.key}`",
                    f"`{default}` {setting.unit}".rstrip() if default else "none",
                    setting.type.allowed,
                    setting.help,
                    "yes" if setting.is_live else "",
                    f"`{setting.name}`, `{setting.environment_variable}`",
                )
            )
        yield _section(group, columns, rows)


def metric_sections() -> Iterator[str]:
    columns = ("metric", "kind", "labels", "description")
    for title, module in METRIC_MODULES.items():
        rows = [
            (f"`{family.name}`", family.kind, ", ".join(family.labels), family.help)
            for family in declared_families(module)
        ]
        yield _section(title, columns, rows)


def _section(title: str, columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [f"### {title}", "", _row(columns), "|" + "---|" * len(columns), *map(_row, rows)]
    return "".join(f"{line}\n" for line in lines)


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


PAGES: Final[dict[str, Callable[[], Iterable[str]]]] = {
    "api.md": api_sections,
    "configuration.md": setting_sections,
    "metrics.md": metric_sections,
}


if __name__ == "__main__":
    for name, sections in PAGES.items():
        path = DOCS / name
        path.write_text(generate(path.read_text("utf-8"), sections()), "utf-8")
