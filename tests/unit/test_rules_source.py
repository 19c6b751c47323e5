"""What the sources must not contain, each rule tried on an example that it must refuse."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator
from typing import TypeVar

import pytest
from source_tree import (
    PACKAGES,
    ROOT,
    Source,
    calls,
    dotted,
    from_text,
    imports,
    is_inside,
    parse,
    sources,
)

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
# Where any error may be caught: the boundary's function, and what it guards.
BOUNDARIES = {
    "cli.main.run": "a bug reaches a person as one line; --debug shows the traceback",
    "node.main.main": "a bug reaches the owner as one line; its traceback is in the log",
    "node.daemon.run_daemon": "raises what the nursery's group holds again, the first cause alone",
    "protocol.simulation.runner._finish": "whoever waits for the job gets its error",
}
# Who may keep a nursery: a supervisor, whose work is to start others' tasks.
SUPERVISORS = {
    "protocol.simulation.world._play": "starts virtual nodes when the script says so",
}
# asyncio belongs to hivemind's program alone.
SIDECAR_CHILD = "node.sidecar.child"

Rule = Callable[[Source], list[str]]
N = TypeVar("N", bound=ast.AST)


def unsafe_loading(source: Source) -> list[str]:
    """Bytes from outside are never turned into code: no pickle, no torch.load, no eval."""
    modules = ("pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "torch.load")
    names = ("torch.load", "eval", "exec", "yaml.load")
    imported = [(node, name) for node, name in imports(source) if is_inside(name, modules)]
    called = [(call, name) for call, name in calls(source) if name in names]
    return [f"{source.at(node)} uses {name}" for node, name in imported + called]


def forks(source: Source) -> list[str]:
    """A process is started by exec: no fork, no multiprocessing, nothing between fork and exec."""
    found = [
        f"{source.at(node)} imports {name}"
        for node, name in imports(source)
        if is_inside(name, ("multiprocessing", "os.fork", "os.forkpty", "pty"))
    ]
    for call, name in calls(source):
        keywords = {keyword.arg for keyword in call.keywords}
        if name in ("os.fork", "os.forkpty") or "preexec_fn" in keywords:
            found.append(f"{source.at(call)} forks")
    return found


def shells_and_sleeps(source: Source) -> list[str]:
    """No shell ever sees our strings, and nothing blocks the event loop by sleeping."""
    found = []
    for call, name in calls(source):
        shell = next((k.value for k in call.keywords if k.arg == "shell"), None)
        is_shell = shell is not None and not (
            isinstance(shell, ast.Constant) and shell.value is False
        )
        if is_shell or name in ("os.system", "os.popen", "time.sleep"):
            found.append(f"{source.at(call)} calls {name}")
    blocking = ("time.sleep", "os.system", "os.popen")
    return found + [f"{source.at(n)} imports {m}" for n, m in imports(source) if m in blocking]


def background_tasks(source: Source) -> list[str]:
    """Every task has an owner: no system tasks, no asyncio beside trio, no nursery kept."""
    found = [
        f"{source.at(call)} calls {name}"
        for call, name in calls(source)
        if name.split(".")[-1] in ("spawn_system_task", "create_task", "ensure_future")
        and not is_inside(source.module, [SIDECAR_CHILD])
    ]
    found += [
        f"{source.at(node)} imports {name}"
        for node, name in imports(source)
        if is_inside(name, ["asyncio"]) and not is_inside(source.module, [SIDECAR_CHILD])
    ]
    return found + [
        f"{source.at(node)} {function} keeps a nursery"
        for function, node in _in_functions(source, _kept_nurseries(source))
        if f"{source.module}.{function}" not in SUPERVISORS
    ]


def _kept_nurseries(source: Source) -> set[ast.AST]:
    """Attributes that are given a nursery, and class-level fields annotated as one."""
    kept: set[ast.AST] = set()
    nurseries = {"nursery"} | {
        item.optional_vars.id
        for node in ast.walk(source.tree)
        if isinstance(node, ast.AsyncWith)
        for item in node.items
        if isinstance(item.context_expr, ast.Call)
        and dotted(item.context_expr.func).endswith("open_nursery")
        and isinstance(item.optional_vars, ast.Name)
    }
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            is_kept = any(isinstance(target, ast.Attribute) for target in targets)
            is_nursery = isinstance(node.value, ast.Name) and node.value.id in nurseries
            is_field = isinstance(node, ast.AnnAssign) and "Nursery" in ast.unparse(node.annotation)
            if (is_kept and is_nursery) or is_field:
                kept.add(node)
    return kept


def broad_excepts(source: Source) -> list[str]:
    """Only a named boundary catches whatever comes; a bug elsewhere must end the process."""
    broad = {"Exception", "BaseException", "ExceptionGroup", "BaseExceptionGroup"}
    found = []
    for function, node in _handlers(source):
        kinds = ast.walk(node.type) if node.type else []
        is_broad = node.type is None or any(dotted(kind) in broad for kind in kinds)
        if is_broad and f"{source.module}.{function}" not in BOUNDARIES:
            found.append(f"{source.at(node)} {function} catches everything")
    for call, name in calls(source):
        caught = {dotted(argument) for argument in call.args}
        if name.endswith("suppress") and caught & broad:
            found.append(f"{source.at(call)} suppresses everything")
    return found


def _handlers(source: Source) -> list[tuple[str, ast.ExceptHandler]]:
    nodes = {node for node in ast.walk(source.tree) if isinstance(node, ast.ExceptHandler)}
    return list(_in_functions(source, nodes))


def _in_functions(source: Source, wanted: Collection[N]) -> Iterator[tuple[str, N]]:
    """Yield the wanted nodes, each with the name of the innermost function around it."""

    def visit(node: ast.AST, function: str) -> Iterator[tuple[str, N]]:
        for child in ast.iter_child_nodes(node):
            if child in wanted:
                yield function, child
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from visit(child, child.name if is_function else function)

    return visit(source.tree, "")


def sizes(source: Source) -> list[str]:
    """A file past 400 lines is two files; a function past 60 is several."""
    num_lines = source.text.count("\n")
    found = [f"{source.name} has {num_lines} lines"] if num_lines > MAX_FILE_LINES else []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                found.append(f"{source.at(node)} {node.name} has {length} lines")
    return found


def unfinished(source: Source) -> list[str]:
    """Nothing is left for later, and nobody is told to look at one machine's folders."""
    words = ("TO" + "DO", "FIX" + "ME", "XX" + "X", "NotImplementedError")
    return [
        f"{source.name}:{number} {line.strip()}"
        for number, line in enumerate(source.text.splitlines(), 1)
        if any(word in line for word in words)
    ]


def untyped_messages(source: Source) -> list[str]:
    """What crosses the wire is typed to the last field."""
    if source.module not in ("protocol.messages", "protocol.records", "protocol.invite"):
        return []
    names = (node for node in ast.walk(source.tree) if dotted(node).split(".")[-1] == "Any")
    return [f"{source.at(node)} uses Any" for node in names]


def raises_in_groups(source: Source) -> list[str]:
    """No raise in an except*: beside a cancellation it leaves as a group, which nobody expects."""
    return [
        f"{source.at(inner)} raises inside except*"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.TryStar)
        for handler in node.handlers
        for inner in ast.walk(handler)
        if isinstance(inner, ast.Raise)
    ]


RULES: tuple[Rule, ...] = (
    unsafe_loading, forks, shells_and_sleeps, background_tasks, broad_excepts, sizes, unfinished,
    untyped_messages, raises_in_groups,
)  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_sources_keep_rule(rule: Rule) -> None:
    assert [finding for source in sources() for finding in rule(source)] == []


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (unsafe_loading, "from pickle import loads"),
        (unsafe_loading, "import torch\nx = torch.load('w.pt', weights_only=True)"),
        (unsafe_loading, "from torch import load"),
        (forks, "import os\nos.fork()"),
        (forks, "from multiprocessing import Process"),
        (forks, "import subprocess\nsubprocess.Popen(['x'], preexec_fn=f)"),
        (shells_and_sleeps, "import subprocess\nsubprocess.run('ls', shell=True)"),
        (shells_and_sleeps, "from time import sleep"),
        (shells_and_sleeps, "import time\ntime.sleep(1)"),
        (background_tasks, "import trio\ntrio.lowlevel.spawn_system_task(f)"),
        (background_tasks, "import asyncio"),
        (
            background_tasks,
            "async def f(self):\n async with trio.open_nursery() as n:\n  self.n = n",
        ),
        (background_tasks, "class A:\n def __init__(self, nursery):\n  self._nursery = nursery"),
        (background_tasks, "class A:\n    nursery: trio.Nursery"),
        (broad_excepts, "try:\n    f()\nexcept Exception:\n    pass"),
        (broad_excepts, "try:\n    f()\nexcept (OSError, BaseException):\n    pass"),
        (broad_excepts, "try:\n    f()\nexcept:\n    pass"),
        (broad_excepts, "from contextlib import suppress\nwith suppress(Exception):\n    f()"),
        (sizes, "\n" * (MAX_FILE_LINES + 1)),
        (sizes, "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES),
        (unfinished, "def f():\n    raise NotImplementedError"),
        (raises_in_groups, "try:\n    f()\nexcept* OSError:\n    raise ValueError from None"),
    ],
)
def test_rule_refuses(rule: Rule, text: str) -> None:
    assert rule(from_text(text))


def test_any_in_messages_is_refused() -> None:
    text = "from typing import Any\nclass Message:\n    field: Any"
    assert untyped_messages(from_text(text, "protocol.messages"))


def test_every_named_exception_is_still_needed() -> None:
    """What no longer catches everything, or keeps no nursery, leaves its list."""
    every = sources()
    caught = {f"{s.module}.{function}" for s in every for function, _ in _handlers(s)}
    kept = {
        f"{s.module}.{function}"
        for s in every
        for function, _ in _in_functions(s, _kept_nurseries(s))
    }
    assert set(BOUNDARIES) <= caught
    assert set(SUPERVISORS) <= kept


@pytest.mark.parametrize("folder", ["tests", "benchmarks"])
def test_sizes_hold_outside_the_packages_too(folder: str) -> None:
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert [finding for path in paths for finding in sizes(parse(path))] == []


def test_all_packages_are_read() -> None:
    assert {source.package for source in sources()} == set(PACKAGES)


def test_no_two_test_files_share_a_name() -> None:
    """pytest imports them by their names alone, and stops at the second."""
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.stem != "__init__"]
    assert sorted(names) == sorted(set(names))
