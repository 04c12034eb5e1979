"""Write the API reference, docs/api.md, from the docstrings and signatures of the public modules.

A module's public names are those of its `__all__`, or else those that it defines itself. The fields
of a dataclass are explained by the comments behind them.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import Any, Final, ForwardRef

MODULES: Final = (
    "escrowmq",
    "escrowmq.blocking",
    "escrowmq.sql",
    "escrowmq.app",
    "escrowmq.django",
    "escrowmq.dbapi",
    "escrowmq.errors",
    "escrowmq.admin",
    "escrowmq.admin.queries",
    "escrowmq.admin.topics",
    "escrowmq.admin.messages",
    "escrowmq.admin.dead_letters",
    "escrowmq.admin.offsets",
    "escrowmq.admin.transactions",
    "escrowmq.spark",
    "escrowmq.pipeline",
    "escrowmq.testing",
)
CODE_WIDTH: Final = 96
_NO_BREAK: Final = "\N{NO-BREAK SPACE}"  # a line of code is not broken within a parameter
_FIELD: Final = re.compile(r"^    (\w+): ([^#]+?)(?: = ([^#]+?))?(?:  # (.*))?$", re.MULTILINE)
_PARAMETER: Final = re.compile(r"^(?=`[\w.=]+`(?:, `[\w.=]+`)*:)", re.MULTILINE)


def api_sections() -> Iterator[str]:
    """Yield a section for each public module."""
    for name in MODULES:
        module = importlib.import_module(name)
        parts = (f"## {name}", _first_paragraph(module), *_module_parts(module))
        yield _join(*parts) + "\n"


def public_names(module: ModuleType) -> list[str]:
    """Return the names that a module offers to users, in the order in which they are documented."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == module.__name__
    ]


@cache
def public_classes() -> frozenset[type]:
    """Return all classes that are documented."""
    modules = map(importlib.import_module, MODULES)
    values = [getattr(module, name) for module in modules for name in public_names(module)]
    return frozenset(value for value in values if inspect.isclass(value))


def public_members(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield methods and properties of a class, with those of base classes that are not public."""
    seen: set[str] = set()
    for base in cls.__mro__:
        if base is not cls and (base in public_classes() or not _is_own(base)):
            continue
        for name, member in vars(base).items():
            is_shown = inspect.isfunction(member) or isinstance(
                member, (property, classmethod, staticmethod)
            )
            if is_shown and not name.startswith("_") and name not in seen:
                seen.add(name)
                yield name, member


def _module_parts(module: ModuleType) -> Iterator[str]:
    for name in public_names(module):
        value = getattr(module, name)
        if inspect.isclass(value) and name != value.__name__:
            yield _join(f"### {name}", f"Another name of `{value.__name__}`.")
        elif inspect.isclass(value):
            yield from _class_parts(value)
        elif inspect.isfunction(value):
            yield _join(f"### {name}", _code(_signature(name, value)), _text(value))
        else:
            yield _join(
                f"### {name}",
                f"An object of the type `{type(value).__name__}`. {_value_text(value)}".strip(),
            )


def _class_parts(cls: type) -> Iterator[str]:
    yield f"### {cls.__name__}"
    if issubclass(cls, BaseException):
        yield f"A kind of `{cls.__base__.__name__ if cls.__base__ else ''}`."
    elif not issubclass(cls, enum.Enum) and not inspect.isabstract(cls):
        yield _code(_signature(cls.__name__, cls))
    yield _text(cls)
    if issubclass(cls, enum.Enum):
        yield "\n".join(f"- `{name}`" for name in cls.__members__)
    elif fields := list(_fields(cls)):
        yield "\n".join(fields)
    bases = [base.__name__ for base in cls.__bases__ if base in public_classes()]
    if bases and not issubclass(cls, BaseException):
        yield f"It has everything of {', '.join(f'`{base}`' for base in bases)} too."
    for name, member in public_members(cls):
        yield _member_part(name, member)


def _is_own(cls: type) -> bool:
    return cls.__module__.startswith("escrowmq")


def _member_part(name: str, member: Any) -> str:
    if isinstance(member, property):
        annotation = inspect.signature(member.fget).return_annotation if member.fget else ""
        return _join(f"**`{name}: {_annotation(annotation)}`**", _text(member))
    function = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
    prefix = "async " if inspect.iscoroutinefunction(function) else ""
    is_bound = not isinstance(member, staticmethod)
    signature = _signature(name, function, skip_first=is_bound)
    return _join(f"**`{prefix}{signature}`**".replace(_NO_BREAK, " "), _text(function))


def _signature(name: str, value: Any, *, skip_first: bool = False) -> str:
    try:
        signature = inspect.signature(value)
    except ValueError:
        return name
    parameters = list(signature.parameters.values())[1 if skip_first else 0 :]
    words: list[str] = []
    is_keyword_only = False
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not is_keyword_only:
            is_keyword_only = True
            words.append("*")
        is_keyword_only = is_keyword_only or parameter.kind is parameter.VAR_POSITIONAL
        words.append(_parameter(parameter))
    result = "" if inspect.isclass(value) else _annotation(signature.return_annotation)
    return f"{name}({', '.join(words)})" + (f" -> {result}" if result else "")


def _parameter(parameter: inspect.Parameter) -> str:
    prefixes = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    stars = next((stars for kind, stars in prefixes.items() if kind == parameter.kind), "")
    annotation = _annotation(parameter.annotation)
    text = f"{stars}{parameter.name}" + (f": {annotation}" if annotation else "")
    if parameter.default is parameter.empty:
        return text.replace(" ", _NO_BREAK)
    equals = " = " if annotation else "="
    return f"{text}{equals}{_value_text(parameter.default) or '…'}".replace(" ", _NO_BREAK)


def _annotation(annotation: Any) -> str:
    if annotation is inspect.Signature.empty:
        return ""
    if isinstance(annotation, ForwardRef):
        return annotation.__forward_arg__
    if isinstance(annotation, type):
        return annotation.__name__
    return str(annotation)


def _value_text(value: Any) -> str:
    """Return a short value as a program would write it; an empty text for any other."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if inspect.isfunction(value) or inspect.isclass(value):
        return str(value.__name__)
    text = f'"{value}"' if isinstance(value, str) and '"' not in value else repr(value)
    return "" if "<" in text or " at 0x" in text or len(text) > CODE_WIDTH else text


def _fields(cls: type) -> Iterator[str]:
    """Yield the fields of a dataclass or a named tuple, if comments explain any of them."""
    names = set(getattr(cls, "__dataclass_fields__", getattr(cls, "_fields", ())))
    if not names:
        return
    attributes = [
        (name, annotation, comment)
        for name, annotation, _, comment in _FIELD.findall(inspect.getsource(cls))
        if name in names and not name.startswith("_")
    ]
    if any(comment for _, _, comment in attributes):
        for name, annotation, comment in attributes:
            yield f"- `{name}: {annotation}`" + (f": {comment}" if comment else "")


# --- text ----------------------------------------------------------------------------------------


def _first_paragraph(module: ModuleType) -> str:
    return (inspect.getdoc(module) or "").partition("\n\n")[0].replace("\n", " ")


def _text(value: Any) -> str:
    """Return a docstring as Markdown: its example becomes code, its parameters become a list."""
    text = inspect.getdoc(value) or ""
    return _PARAMETER.sub("- ", text)


def _code(text: str) -> str:
    lines = textwrap.wrap(text, CODE_WIDTH, subsequent_indent="    ", break_on_hyphens=False)
    return textwrap.indent("\n".join(lines), "    ").replace(_NO_BREAK, " ")


def _join(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part)
