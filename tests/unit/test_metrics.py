"""Metrics in the text format of Prometheus."""

from __future__ import annotations

import math

import pytest

from escrowmq.metrics import Counter, Distribution, Gauge, Histogram, Registry, Samples
from tests.support.scraping import parse


def text_of(*samples: Samples, **labels: str) -> str:
    registry = Registry(labels)
    registry.add(lambda: samples)
    return "".join(registry.lines())


def test_a_gauge_and_a_counter_have_a_heading_each() -> None:
    assert text_of(
        Gauge("connections", "Open connections.").value(3),
        Counter("sends_total", "Sends.", ("topic",)).samples([(("a",), 1), (("b",), 2.5)]),
    ) == (
        "# HELP connections Open connections.\n"
        "# TYPE connections gauge\n"
        "connections 3\n"
        "# HELP sends_total Sends.\n"
        "# TYPE sends_total counter\n"
        'sends_total{topic="a"} 1\n'
        'sends_total{topic="b"} 2.5\n'
    )


def test_every_sample_has_the_labels_of_the_registry() -> None:
    text = text_of(
        Gauge("a", "A.").value(1),
        Gauge("b", "B.", ("x",)).value(2, "y"),
        Histogram("h", "H.").value(Distribution((1,))),
        node="n",
    )
    samples = parse(text).samples
    assert len(samples) == 2 + 4
    assert all(labels["node"] == "n" for _, labels, _ in samples)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain", "plain"),
        ('say "hi"', r"say \"hi\""),
        ("a\\b", r"a\\b"),
        ("a\nb", r"a\nb"),
        ("a\\nb", r"a\\nb"),
        ("é☃, }", "é☃, }"),
    ],
)
def test_labels_are_escaped_and_parsed_to_the_same_value(value: str, text: str) -> None:
    page = text_of(Gauge("a", "A.", ("label", "next")).value(1, value, "1"))
    assert f'a{{label="{text}",next="1"}} 1\n' in page
    assert parse(page).labels("a") == [{"label": value, "next": "1"}]


def test_a_help_text_stays_on_its_line() -> None:
    text = text_of(Gauge("a", 'One\nand \\ "two".').value(1))
    assert text.startswith('# HELP a One\\nand \\\\ "two".\n# TYPE')


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (2**63, "9223372036854775808"),
        (True, "1"),
        (0.1, "0.1"),
        (1e-09, "1e-09"),
        (math.inf, "+Inf"),
        (-math.inf, "-Inf"),
        (math.nan, "NaN"),
    ],
)
def test_numbers_are_written_in_the_format_of_prometheus(value: float, text: str) -> None:
    assert text_of(Gauge("a", "A.").value(value)).splitlines()[-1] == f"a {text}"


def test_the_buckets_of_a_histogram_are_cumulative_and_end_with_all() -> None:
    distribution = Distribution((1, 2.5, 10))
    for value in (0, 1, 1.1, 2.5, 11, 1000):
        distribution.observe(value)
    distribution.observe(10, times=3)
    assert text_of(Histogram("h", "H.", ("a",)).value(distribution, "b")).splitlines()[2:] == [
        'h_bucket{a="b",le="1"} 2',
        'h_bucket{a="b",le="2.5"} 4',
        'h_bucket{a="b",le="10"} 7',
        'h_bucket{a="b",le="+Inf"} 9',
        'h_sum{a="b"} 1045.6',
        'h_count{a="b"} 9',
    ]
    assert distribution.count == 9


def test_an_empty_histogram_has_all_its_buckets() -> None:
    assert text_of(Histogram("h", "H.").value(Distribution((1,)))).splitlines()[2:] == [
        'h_bucket{le="1"} 0',
        'h_bucket{le="+Inf"} 0',
        "h_sum 0",
        "h_count 0",
    ]


def test_samples_of_one_family_are_joined_under_one_heading() -> None:
    registry = Registry()
    a, b = Gauge("a", "A.", ("p",)), Gauge("b", "B.")
    registry.add(lambda: [a.value(1, "1"), b.value(0)])
    registry.add(lambda: [a.value(2, "2")])
    assert "".join(registry.lines()).splitlines() == [
        *("# HELP a A.", "# TYPE a gauge", 'a{p="1"} 1', 'a{p="2"} 2'),
        *("# HELP b B.", "# TYPE b gauge", "b 0"),
    ]


def test_a_name_that_is_declared_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="metric a is declared twice"):
        text_of(Gauge("a", "A.").value(1), Counter("a", "A.").value(1))


@pytest.mark.parametrize("name", ["", "1a", "a-b", "a b", "é", "a\n"])
def test_a_name_that_is_invalid_in_prometheus_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is not a valid name"):
        Gauge(name, "A.")
    with pytest.raises(ValueError, match="is not a valid name"):
        Gauge("a", "A.", (name,))
    with pytest.raises(ValueError, match="is not a valid name"):
        Registry({name: "x"})


@pytest.mark.parametrize("label_values", [(), ("x", "y")])
def test_a_sample_has_a_value_for_each_label(label_values: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="zip"):
        text_of(Gauge("a", "A.", ("label",)).value(1, *label_values))


def test_collectors_are_called_for_each_page() -> None:
    registry, values = Registry(), iter((1, 2))
    registry.add(lambda: [Gauge("a", "A.").value(next(values))])
    assert "".join(registry.lines()).endswith("a 1\n")
    assert "".join(registry.lines()).endswith("a 2\n")
