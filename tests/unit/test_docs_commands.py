"""What the pages name exists: commands, flags, make targets, linked files, places in sources."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main
from source_tree import ROOT, parse

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SHELLS = ("sh", "bash", "shell", "console")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`((?:\.venv/bin/)?(?:shoal|make) [^`\n]+)`")
_PLACE = re.compile(r"`([\w/]+\.py):([\w.]+)`")
_LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")


def command_lines(text: str) -> Iterator[list[str]]:
    """Yield the words of each `shoal ...` and `make ...` in shell blocks and in running text."""
    blocks = [code for language, code in _FENCE.findall(text) if language in SHELLS]
    lines = [line.removeprefix("$ ") for code in blocks for line in _joined(code).splitlines()]
    for line in lines + _INLINE.findall(_FENCE.sub("", text)):
        words = shlex.split(line, comments=True)
        words = words[next((i for i, w in enumerate(words) if not _is_assignment(w)), 0) :]
        if words and (program := words[0].rsplit("/", 1)[-1]) in ("shoal", "make"):
            yield [program, *words[1:]]


def _joined(code: str) -> str:
    return code.replace("\\\n", " ")


def _is_assignment(word: str) -> bool:
    return re.match(r"[A-Z_]+=", word) is not None


@cache
def _root_command() -> Any:
    from cli.main import app

    return typer.main.get_command(app)


def problems(words: list[str]) -> list[str]:
    """Say what in a command line does not exist."""
    program, *rest = words
    if program == "make":
        text = (ROOT / "Makefile").read_text()
        targets = [w for w in rest if "=" not in w and not w.startswith("-")]
        return [f"make {t}" for t in targets if not re.search(rf"^{re.escape(t)}:", text, re.M)]
    return _shoal_problems(rest)


def _shoal_problems(words: list[str]) -> list[str]:
    command, named = _root_command(), ["shoal"]
    found = []
    for word in words:
        is_group = hasattr(command, "commands")
        if word.startswith("-"):
            if word.split("=")[0] not in _flags(command):
                found.append(f"{' '.join(named)} {word}")
        elif is_group and word in command.commands:
            command = command.commands[word]
            named.append(word)
        elif is_group:
            found.append(f"{' '.join(named)} {word}")
            break
    return found


def _flags(command: Any) -> set[str]:
    own = {flag for p in command.params for flag in (*p.opts, *p.secondary_opts)}
    # --debug may stand anywhere, see cli/main.py
    return own | {"--help", "-h", "--debug"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_on_page_exist(page: Path) -> None:
    lines = list(command_lines(page.read_text()))
    assert [problem for words in lines for problem in problems(words)] == []


@pytest.mark.parametrize("page", [*PAGES, ROOT / "SECURITY.md"], ids=lambda page: page.name)
def test_links_on_page_lead_somewhere(page: Path) -> None:
    targets = _LINK.findall(page.read_text())
    assert [t for t in targets if not (page.parent / t).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_places_in_sources_exist(page: Path) -> None:
    places = _PLACE.findall(page.read_text())
    assert [f"{path}:{name}" for path, name in places if not _is_defined(path, name)] == []


def _is_defined(path: str, name: str) -> bool:
    """Whether a file defines ``function`` or ``Class.method``."""
    if not (ROOT / path).is_file():
        return False
    body: list[ast.stmt] = parse(ROOT / path).tree.body
    for part in name.split("."):
        named = [node for node in body if getattr(node, "name", None) == part]
        if not named:
            return False
        body = getattr(named[0], "body", [])
    return True


def test_a_place_that_is_gone_is_found() -> None:
    assert _is_defined("protocol/deadlines.py", "Deadlines.scaled")
    assert not _is_defined("protocol/deadlines.py", "Deadlines.stretched")
    assert not _is_defined("protocol/dreadlines.py", "Deadlines")


def test_readme_shows_the_two_commands() -> None:
    lines = [" ".join(words) for words in command_lines((ROOT / "README.md").read_text())]
    assert {"make demo", "make test", "shoal swarm create manifest.toml --holders 2"} <= set(lines)


@pytest.mark.parametrize(
    "line", ["shoal fly", "shoal demo --sideways", "shoal swarm fly", "make nothing-of-the-kind"]
)
def test_what_does_not_exist_is_found(line: str) -> None:
    text = f"```sh\n{line}  # a comment\n```\n"
    assert [problem for words in command_lines(text) for problem in problems(words)]
