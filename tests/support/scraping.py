"""Read a page of metrics as strictly as the format is written down, and get one over HTTP."""

from __future__ import annotations

import re
import urllib.request
from dataclasses import dataclass, field

WAIT_S = 20.0
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\[\\n"])*)"(,|$)')
_SUFFIXES = {"histogram": ("_bucket", "_sum", "_count")}


@dataclass
class Page:
    """Values by name and labels; every heading once, and its samples behind it."""

    kinds: dict[str, str] = field(default_factory=dict)
    samples: list[tuple[str, dict[str, str], float]] = field(default_factory=list)

    def value(self, name: str, **labels: str) -> float:
        """Of the one sample that has these labels among its own."""
        [found] = self.values(name, **labels)
        return found

    def values(self, name: str, **labels: str) -> list[float]:
        return [
            value
            for found, has, value in self.samples
            if found == name and labels.items() <= has.items()
        ]

    def labels(self, name: str) -> list[dict[str, str]]:
        return [labels for found, labels, _ in self.samples if found == name]


def parse(text: str) -> Page:
    page = Page()
    assert text.endswith("\n")
    name = ""
    for line in text.removesuffix("\n").split("\n"):
        if line.startswith("# HELP "):
            name = line.split(" ")[2]
            assert name not in page.kinds, f"{name} has two headings"
            page.kinds[name] = ""
        elif line.startswith("# TYPE "):
            _, _, typed, kind = line.split(" ")
            assert typed == name
            page.kinds[name] = kind
        else:
            sample = _SAMPLE.fullmatch(line)
            assert sample is not None, line
            known = {name + suffix for suffix in _SUFFIXES.get(page.kinds[name], ("",))}
            assert sample[1] in known, f"{line} below {name}"
            page.samples.append((sample[1], _labels(sample[2] or ""), float(sample[3])))
    keys = [(name, *sorted(labels.items())) for name, labels, _ in page.samples]
    assert len(set(keys)) == len(keys), "a sample stands there twice"
    return page


def _labels(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    at = 0
    while at < len(text):
        label = _LABEL.match(text, at)
        assert label is not None, text
        assert label[1] not in found, text
        found[label[1]] = re.sub(
            r"\\(.)", lambda escape: "\n" if escape[1] == "n" else escape[1], label[2]
        )
        at = label.end()
    return found


def scrape(address: str) -> Page:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=WAIT_S) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return parse(answer.read().decode())
