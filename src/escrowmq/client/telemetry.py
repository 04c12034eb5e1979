"""OpenTelemetry spans of sends, transactions, checks and handlers.

    Producer(..., telemetry=True)              uses the tracer provider of the process
    Consumer(..., telemetry=provider)          uses this one

The context of a span travels with its message in the properties `traceparent` and `tracestate`
(W3C Trace Context). Handlers of a consumer continue the trace. Code that iterates over a consumer
does it by hand:

    telemetry = Telemetry.from_option(True)
    with telemetry.continue_trace("process", message):
        ...
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from escrowmq.client.messages import ReceivedMessage

_SYSTEM: Final = "rocketmq"  # OpenTelemetry's name of this protocol
_SCOPE: Final = "escrowmq"


class Span:
    """A span that has been started."""

    def __init__(self, api: Any, span: Any) -> None:
        self._api = api
        self._span = span

    @property
    def context(self) -> Any:
        """The context for child spans."""
        return self._api.trace.set_span_in_context(self._span)

    def end(self, attributes: Mapping[str, Any], error: BaseException | None = None) -> None:
        for name, value in attributes.items():
            self._span.set_attribute(name, value)
        if error is not None:
            self._span.record_exception(error)
            self._span.set_status(self._api.trace.StatusCode.ERROR, str(error))
        self._span.end()


class _OpenTelemetryApi:
    """The modules of opentelemetry-api that are used; the package is optional."""

    def __init__(self) -> None:
        try:
            self.trace: Any = importlib.import_module("opentelemetry.trace")
            tracecontext = importlib.import_module("opentelemetry.trace.propagation.tracecontext")
        except ImportError as error:
            raise ValueError(
                "telemetry needs opentelemetry-api: pip install 'escrowmq[otel]'"
            ) from error
        self.propagator: Any = tracecontext.TraceContextTextMapPropagator()


class Telemetry:
    """Starts spans with a tracer of the given provider, or of the process's provider."""

    def __init__(self, provider: Any = None) -> None:
        self._api = _OpenTelemetryApi()
        trace = self._api.trace
        self._tracer = trace.get_tracer(_SCOPE, tracer_provider=provider)
        self._span_kinds = trace.SpanKind

    @classmethod
    def from_option(cls, option: Any) -> Telemetry | None:
        """Return the telemetry for a client's option: True, a TracerProvider, or None for none.

        Raises ValueError if opentelemetry-api is not installed.
        """
        if not option:
            return None
        return cls(None if option is True else option)

    def start_send(
        self, topic: str, *, parent: Span | None = None, count: int = 1
    ) -> tuple[Span, dict[str, str]]:
        """Start the span of a send. Also return the properties that carry its context."""
        attributes: dict[str, Any] = {
            "messaging.operation.type": "send",
            "messaging.destination.name": topic,
        }
        if count > 1:
            attributes["messaging.batch.message_count"] = count
        context = parent.context if parent is not None else None
        span = self._start_span(f"send {topic}", self._span_kinds.PRODUCER, context, attributes)
        carrier: dict[str, str] = {}
        self._api.propagator.inject(carrier, context=span.context)
        return span, {name: value for name, value in carrier.items() if value}

    def start_transaction(self, name: str = "") -> Span:
        return self._start_span(f"transaction {name}".rstrip(), self._span_kinds.INTERNAL, None, {})

    @contextmanager
    def continue_trace(self, operation: str, message: ReceivedMessage) -> Iterator[Span]:
        """Run a block in a span that is a child of the one that sent the message."""
        context = self._api.propagator.extract(message.properties)
        attributes = {
            "messaging.operation.type": operation,
            "messaging.destination.name": message.topic,
            "messaging.message.id": message.message_id,
        }
        name = f"{operation} {message.topic}"
        span = self._start_span(name, self._span_kinds.CONSUMER, context, attributes)
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
