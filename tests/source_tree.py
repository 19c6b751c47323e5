"""The project's sources as syntax trees, for tests that hold rules about them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("cli", "node", "protocol", "stages")


@dataclass(frozen=True)
class Source:
    """One parsed module."""

    path: Path
    module: str
    text: str
    tree: ast.Module

    @property
    def name(self) -> str:
        """The path inside the project, as findings print it."""
        return self.path.relative_to(ROOT).as_posix()

    @property
    def package(self) -> str:
        """cli, node, protocol or stages."""
        return self.module.split(".")[0]

    def at(self, node: ast.AST) -> str:
        """Return ``path:line`` of a node."""
        return f"{self.name}:{getattr(node, 'lineno', 0)}"


@cache
def sources(*packages: str) -> tuple[Source, ...]:
    """Return all modules of the given packages (all of the project's if none is given)."""
    paths = (p for name in packages or PACKAGES for p in sorted((ROOT / name).rglob("*.py")))
    return tuple(parse(path) for path in paths)


@cache
def parse(path: Path) -> Source:
    """Parse one file."""
    text = path.read_text()
    parts = path.relative_to(ROOT).with_suffix("").parts
    module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return Source(path, module, text, ast.parse(text))


def from_text(text: str, module: str = "node.example") -> Source:
    """Parse text as if it were a module, so that a rule can be tried on what it must refuse."""
    return Source(ROOT / (module.replace(".", "/") + ".py"), module, text, ast.parse(text))


def imports(source: Source) -> Iterator[tuple[ast.stmt, str]]:
    """Yield every imported name in full, also those imported inside functions."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(source, node)
            yield from ((node, f"{base}.{alias.name}") for alias in node.names)


def _absolute(source: Source, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    is_package = source.path.name == "__init__.py"
    parts = source.module.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, node.module] if node.module else parts)


def is_inside(name: str, packages: Iterable[str]) -> bool:
    """Tell whether a dotted name is one of the packages or lies in one."""
    return any(name == package or name.startswith(package + ".") for package in packages)


def dotted(node: ast.AST) -> str:
    """Return ``a.b.c`` for such an expression, else the empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def calls(source: Source) -> Iterator[tuple[ast.Call, str]]:
    """Yield every call with the dotted name of what is called."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call):
            yield node, dotted(node.func)
