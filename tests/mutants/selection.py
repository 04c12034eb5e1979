"""Which mistakes are planted: a sample by seed, spread evenly over the packages."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.operators import Mutation, mutations


@dataclass(frozen=True, slots=True)
class Mutant:
    """A mistake in a file. The path is relative to the root of the project."""

    package: str
    path: str
    mutation: Mutation
    old_line: str
    new_line: str

    @property
    def where(self) -> str:
        """Return file:line, which an editor can open."""
        return f"{self.path}:{self.mutation.line}"


def packages(root: Path) -> dict[str, list[Path]]:
    """Return the modules of every package directly below a root package in `src`.

    Nested packages belong to the one around them. Modules directly in a root package are listed
    under its own name.
    """
    modules: dict[str, list[Path]] = {}
    for init in sorted((root / "src").glob("*/__init__.py")):
        root_package = init.parent
        modules[root_package.name] = sorted(root_package.glob("*.py"))
        for inner in sorted(root_package.glob("*/__init__.py")):
            modules.setdefault(inner.parent.name, []).extend(sorted(inner.parent.rglob("*.py")))
    return modules


def mutants_of(root: Path, package: str, modules: Iterable[Path]) -> list[Mutant]:
    """Return every mistake that can be planted in a package."""
    mutants = []
    for module in modules:
        text = module.read_text(encoding="utf-8")
        path = module.relative_to(root).as_posix()
        for mutation in mutations(text):
            mutants.append(Mutant(package, path, mutation, *mutation.old_and_new_line(text)))
    return mutants


def sample(mutants: Mapping[str, Sequence[Mutant]], count: int, seed: int) -> list[Mutant]:
    """Return `count` mutants, as many from each package as from any other while it has them.

    The order within a package depends on the seed and the package alone: a run over fewer packages
    or with a larger count plants the same mistakes and more.
    """
    shuffled: dict[str, list[Mutant]] = {}
    for package in sorted(mutants):
        shuffled[package] = list(mutants[package])
        random.Random(f"{seed} {package}").shuffle(shuffled[package])
    turns = list(shuffled)
    random.Random(seed).shuffle(turns)  # which packages get one more when the count is uneven
    chosen: list[Mutant] = []
    depth = 0
    while len(chosen) < count and any(len(each) > depth for each in shuffled.values()):
        chosen += [shuffled[name][depth] for name in turns if len(shuffled[name]) > depth]
        depth += 1
    return sorted(chosen[:count], key=lambda mutant: (mutant.package, mutant.path))
