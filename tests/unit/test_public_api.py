"""The public modules: what they offer is found by `dir`, documented, and typed."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from docs.api_reference import MODULES, public_members, public_names
from escrowmq import Producer
from escrowmq.client.producer.producer import ProducerOptions


def documented_parts(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield everything that needs a docstring, by its name."""
    for name in public_names(module):
        value = getattr(module, name)
        if inspect.isfunction(value) or inspect.isclass(value):
            yield name, value
        if inspect.isclass(value):
            yield from ((f"{name}.{member}", part) for member, part in public_members(value))


@pytest.mark.parametrize("name", MODULES)
def test_everything_public_is_found_by_dir_and_has_a_docstring(name: str) -> None:
    module = importlib.import_module(name)
    assert set(public_names(module)) <= set(dir(module))
    parts = dict(documented_parts(module))
    assert parts or name == "escrowmq.django"
    # A method may have its docstring from a base class. A dataclass without one gets its signature.
    texts = {part: inspect.getdoc(value) for part, value in parts.items()}
    undocumented = [part for part, text in texts.items() if not text or text.startswith(f"{part}(")]
    assert undocumented == []


@pytest.mark.parametrize("name", MODULES)
def test_every_public_function_names_its_types(name: str) -> None:
    module = importlib.import_module(name)
    untyped = []
    for part, value in documented_parts(module):
        function = value.fget if isinstance(value, property) else value
        if inspect.isfunction(function):
            signature = inspect.signature(function)
            parameters = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
            annotations = [signature.return_annotation, *(p.annotation for p in parameters)]
            untyped += [part for annotation in annotations if annotation is inspect.Signature.empty]
    assert untyped == []


def test_options_that_are_passed_on_are_those_of_the_producer() -> None:
    parameters = inspect.signature(Producer).parameters
    own_parameters = {"servers", "group", "clock"}
    assert set(ProducerOptions.__annotations__) == set(parameters) - own_parameters
