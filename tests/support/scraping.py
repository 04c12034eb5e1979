"""Get a page of metrics over HTTP and read it with the parser of prometheus_client."""

from __future__ import annotations

import urllib.request
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

WAIT_S = 20.0
_SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}


@dataclass
class Page:
    """The samples of a page, and the type of each metric by name."""

    kinds: dict[str, str] = field(default_factory=dict)
    samples: list[tuple[str, dict[str, str], float]] = field(default_factory=list)

    def value(self, name: str, **labels: str) -> float:
        """Return the value of the only sample that has at least these labels."""
        [value] = self.values(name, **labels)
        return value

    def values(self, name: str, **labels: str) -> list[float]:
        return [
            value
            for sample_name, sample_labels, value in self.samples
            if sample_name == name and labels.items() <= sample_labels.items()
        ]

    def labels(self, name: str) -> list[dict[str, str]]:
        return [labels for sample_name, labels, _ in self.samples if sample_name == name]


def parse(text: str) -> Page:
    """Parse a page and reject what the parser tolerates.

    That is a heading or a sample that appears twice, and a sample below another metric's heading.
    """
    assert text.endswith("\n")
    page = Page()
    for family in text_string_to_metric_families(text):
        assert family.type != "unknown", f"{family.name} has no heading"
        # The parser removes the suffix from the name of a counter.
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert name not in page.kinds, f"{name} has two headings"
        page.kinds[name] = family.type
        names = {family.name + suffix for suffix in _SUFFIXES.get(family.type, ("",))}
        for sample in family.samples:
            assert sample.name in names, f"{sample.name} below {name}"
            page.samples.append((sample.name, dict(sample.labels), sample.value))
    keys = [(name, *sorted(labels.items())) for name, labels, _ in page.samples]
    assert len(set(keys)) == len(keys), "a sample appears twice"
    return page


def scrape(address: str) -> Page:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=WAIT_S) as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return parse(response.read().decode())
