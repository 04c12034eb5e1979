"""Which mistakes are planted: a random sample, spread evenly over the packages."""

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
        """Return the location as file:line."""
        return f"{self.path}:{self.mutation.line}"


def packages(root: Path) -> dict[str, list[Path]]:
    """Return the modules of every package directly below a root package in `src`.

    The modules of nested packages belong to their outer package. Modules directly in a root package
    are listed under its own name.
    """
    modules: dict[str, list[Path]] = {}
    for init_file in sorted((root / "src").glob("*/__init__.py")):
        root_package = init_file.parent
        modules[root_package.name] = sorted(root_package.glob("*.py"))
        for inner_init_file in sorted(root_package.glob("*/__init__.py")):
            modules.setdefault(inner_init_file.parent.name, []).extend(
                sorted(inner_init_file.parent.rglob("*.py"))
            )
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
    """Return `count` mutants, the same number from each package as far as it has them.

    The order within a package depends only on the seed and the package. So a run with fewer
    packages or a larger count plants the same mistakes of a package, and more.
    """
    shuffled: dict[str, list[Mutant]] = {}
    for package in sorted(mutants):
        shuffled[package] = list(mutants[package])
        random.Random(f"{seed} {package}").shuffle(shuffled[package])
    package_order = list(shuffled)
    # The first packages get one more mutant if the count is uneven.
    random.Random(seed).shuffle(package_order)
    selected: list[Mutant] = []
    depth = 0
    longest = max(map(len, shuffled.values()), default=0)
    while len(selected) < count and depth < longest:
        selected += [shuffled[name][depth] for name in package_order if len(shuffled[name]) > depth]
        depth += 1
    return sorted(selected[:count], key=lambda mutant: (mutant.package, mutant.path))
