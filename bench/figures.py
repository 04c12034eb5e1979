"""Results of several rounds: medians, ratios to the better competitor, and their text."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from bench.generator import Outcome

NOTHING = "-"


@dataclass(frozen=True)
class Figures:
    """The medians of some rounds, and every failure in any of them."""

    rate: float  # messages per second
    answer_rate: float
    p50_us: float
    p99_us: float
    cpu_us: float  # CPU time of the server per message
    failures: dict[str, int] = field(default_factory=dict)


def summary(outcomes: Sequence[Outcome], more_failures: Mapping[str, int] | None = None) -> Figures:
    failures: Counter[str] = Counter(more_failures or {})
    for outcome in outcomes:
        failures.update({f"code {code}": count for code, count in outcome.errors.items()})
        failures.update({f"one-way {code}": count for code, count in outcome.unasked.items()})
        failures.update({"unanswered": outcome.unanswered})
    return Figures(
        rate=_median(outcomes, lambda o: o.rate),
        answer_rate=_median(outcomes, lambda o: o.answer_rate),
        p50_us=_median(outcomes, lambda o: o.p50_us),
        p99_us=_median(outcomes, lambda o: o.p99_us),
        cpu_us=_median(outcomes, cpu_us),
        failures={what: count for what, count in failures.items() if count},
    )


def cpu_us(outcome: Outcome) -> float:
    return outcome.server_cpu_s * 1e6 / outcome.messages if outcome.messages else 0.0


def _median(outcomes: Sequence[Outcome], figure: Callable[[Outcome], float]) -> float:
    return statistics.median(map(figure, outcomes)) if outcomes else 0.0


def ratio(mine: float, theirs: float) -> str:
    return f"{mine / theirs:.2f}" if theirs > 0 else NOTHING


def to_the_better(mine: Figures, others: Sequence[Figures]) -> str:
    """Return each figure relative to the best value of any competitor."""
    sound = [figures for figures in others if figures.rate > 0]
    if not sound or mine.rate == 0:
        return NOTHING
    rate = ratio(mine.rate, max(figures.rate for figures in sound))
    p99 = ratio(mine.p99_us, min(figures.p99_us for figures in sound))
    cpu = ratio(mine.cpu_us, min(figures.cpu_us for figures in sound))
    return f"rate {rate}, p99 {p99}, CPU {cpu}"


def latency(us: float) -> str:
    return f"{us / 1000:.1f} ms" if us >= 10_000 else f"{us / 1000:.2f} ms"


def sent(figures: Figures) -> str:
    """Format messages per second, p50, p99, the server's CPU time per message, and failures."""
    return (
        f"{figures.rate:,.0f}/s, {latency(figures.p50_us)}, {latency(figures.p99_us)}, "
        f"{figures.cpu_us:.1f} us{failed(figures)}"
    )


def pulled(figures: Figures) -> str:
    """Format the same for pulls: responses per second, and CPU time per message."""
    return (
        f"{figures.answer_rate:,.0f}/s, {latency(figures.p50_us)}, {latency(figures.p99_us)}, "
        f"{figures.cpu_us:.2f} us{failed(figures)}"
    )


def failed(figures: Figures) -> str:
    if not figures.failures:
        return ""
    words = ", ".join(f"{what}: {count:,}" for what, count in sorted(figures.failures.items()))
    return f"; **failed: {words}**"
