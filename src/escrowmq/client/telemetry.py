"""OpenTelemetry, for those who have it: spans of sends, transactions, checks and handlers.

    Producer(…, telemetry=True)              the provider that the process has set
    Consumer(…, telemetry=provider)          this one

The context of a span travels with its message in the properties `traceparent` and `tracestate`
(W3C Trace Context). A consumer's handlers go on from there; who iterates does it by hand:

    tracing = Telemetry.of(True)
    with tracing.continued("process", message):
        ...
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from escrowmq.client.messages import ReceivedMessage

_SYSTEM: Final = "rocketmq"  # OpenTelemetry's word for this protocol
_SCOPE: Final = "escrowmq"


class Span:
    """One that has begun."""

    def __init__(self, api: Any, span: Any) -> None:
        self._api = api
        self._span = span

    @property
    def context(self) -> Any:
        return self._api.trace.set_span_in_context(self._span)

    def end(self, attributes: Mapping[str, Any], error: BaseException | None = None) -> None:
        for name, value in attributes.items():
            self._span.set_attribute(name, value)
        if error is not None:
            self._span.record_exception(error)
            self._span.set_status(self._api.trace.StatusCode.ERROR, str(error))
        self._span.end()


class _OpenTelemetryApi:
    """The parts of opentelemetry-api that are used, loaded when they are first wanted."""

    def __init__(self) -> None:
        try:
            self.trace: Any = importlib.import_module("opentelemetry.trace")
            carried = importlib.import_module("opentelemetry.trace.propagation.tracecontext")
        except ImportError as error:
            raise ValueError(
                "telemetry needs opentelemetry-api: pip install 'escrowmq[otel]'"
            ) from error
        self.propagator: Any = carried.TraceContextTextMapPropagator()


class Telemetry:
    def __init__(self, provider: Any = None) -> None:
        self._api = _OpenTelemetryApi()
        trace = self._api.trace
        self._tracer = trace.get_tracer(_SCOPE, tracer_provider=provider)
        self._span_kinds = trace.SpanKind

    @classmethod
    def from_option(cls, option: Any) -> Telemetry | None:
        """`wanted`: True, a TracerProvider, or nothing. Raises ValueError if it is not there."""
        if not option:
            return None
        return cls(None if option is True else option)

    def start_send(
        self, topic: str, *, parent: Span | None = None, count: int = 1
    ) -> tuple[Span, dict[str, str]]:
        """A span, and the properties that carry it."""
        facts = {"messaging.operation.type": "send", "messaging.destination.name": topic}
        more = {"messaging.batch.message_count": count} if count > 1 else {}
        context = parent.context if parent is not None else None
        span = self._start_span(
            f"send {topic}", self._span_kinds.PRODUCER, context, {**facts, **more}
        )
        carrier: dict[str, str] = {}
        self._api.propagator.inject(carrier, context=span.context)
        return span, {name: value for name, value in carrier.items() if value}

    def start_transaction(self, name: str = "") -> Span:
        return self._start_span(f"transaction {name}".rstrip(), self._span_kinds.INTERNAL, None, {})

    @contextmanager
    def continue_trace(self, operation: str, message: ReceivedMessage) -> Iterator[Span]:
        """A span that is the child of the one that sent this message; current meanwhile."""
        context = self._api.propagator.extract(message.properties)
        facts = {
            "messaging.operation.type": operation,
            "messaging.destination.name": message.topic,
            "messaging.message.id": message.message_id,
        }
        name = f"{operation} {message.topic}"
        span = self._start_span(name, self._span_kinds.CONSUMER, context, facts)
        with self._api.trace.use_span(
            span._span, end_on_exit=True, record_exception=True, set_status_on_exception=True
        ):
            yield span

    def _start_span(
        self, name: str, kind: Any, context: Any, span_attributes: Mapping[str, Any]
    ) -> Span:
        attributes = {"messaging.system": _SYSTEM, **span_attributes}
        span = self._tracer.start_span(name, context=context, kind=kind, attributes=attributes)
        return Span(self._api, span)
