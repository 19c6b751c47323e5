"""Every wait for another party has a limit, and takes it from the one table of deadlines."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import pytest
from source_tree import Source, dotted, from_text, is_inside, sources

from protocol.deadlines import Deadlines

SCOPES = ("fail_after", "move_on_after", "fail_at", "move_on_at")
# Limits that are not the table's, each with its reason. Shielded clean-up needs no entry: it runs
# when the table's limit has passed already, and must still end.
OWN_LIMITS: dict[str, str] = {
    "node.client._stream": "a long text takes long; it is this computer's own daemon",
    "node.sidecar.link.run": "a moment for the last words of a child that has ended already",
    "protocol.core.discovery._rest": "between two limits of the table; the event is its own",
    "protocol.core.handing_on._offer": "a measured time between two limits of the table",
    "protocol.core.leading.run": "a tick: it waits for an event of its own",
    "protocol.core.sending_back._offer": "a measured time between two limits of the table",
}
# Calls that wait for another party, by the package whose job they are.
OUTSIDE_CALLS: dict[str, set[str]] = {
    "node.transport": {
        "read", "write", "new_stream", "dial_addr", "dial_peer", "connect", "disconnect",
        "select_one_of", "open_tcp_stream", "receive_some", "send_all",
    },
    "node.sidecar": {"receive_some", "send_all", "wait", "run_process"},
}  # fmt: skip
# Waits without a limit in place, each with what ends it instead.
ENDED_OTHERWISE: dict[str, str] = {
    "node.sidecar.averager.run": "an event of its own: somebody wants an averager",
    "node.sidecar.averager._run": "an event of its own: somebody wants another averager",
    "node.sidecar.averager.ready": "an event of its own; the round that waits has averaging_s",
    "node.sidecar.child.program._end_with": "waits for p2pd's end, for as long as it lives",
    "node.sidecar.link.call": "the supervisor's call and start are its callers and set limits",
    "node.sidecar.link.close": "the process was killed; before that the wait is limited",
    "node.sidecar.link.run": "waits for the child's end; the supervisor pings it all the while",
    "node.transport.noise._send": "the muxer calls it, shielded, under write_stall_s",
    "node.sidecar.link._write": "the child's end breaks the pipe, and each call has its limit",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef
EVERYWHERE = ("node", "protocol", "cli")


@dataclass
class Call:
    """A call and where it stands."""

    node: ast.Call
    name: str
    function: str
    scope: ast.AST
    is_awaited: bool
    is_limited: bool
    is_shielded: bool


@dataclass
class _Finder(ast.NodeVisitor):
    """Collects calls with the innermost function and the time limits around them."""

    found: list[Call] = field(default_factory=list)
    _functions: list[ast.AST] = field(default_factory=list)
    _awaited: set[int] = field(default_factory=set)
    _limits: int = 0
    _shields: int = 0

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._enter(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._enter(node)

    def _enter(self, node: ast.AST) -> None:
        outside = self._limits, self._shields
        self._limits = self._shields = 0
        self._functions.append(node)
        self.generic_visit(node)
        self._functions.pop()
        self._limits, self._shields = outside

    def visit_With(self, node: ast.With) -> None:
        opened = [i.context_expr for i in node.items if isinstance(i.context_expr, ast.Call)]
        is_limit, is_shield = any(map(_is_scope, opened)), any(map(_has_shield, opened))
        self._shields += is_shield
        for item in node.items:
            self.visit(item)
        self._limits += is_limit
        for statement in node.body:
            self.visit(statement)
        self._limits -= is_limit
        self._shields -= is_shield

    def visit_Await(self, node: ast.Await) -> None:
        self._awaited.add(id(node.value))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        scope = self._functions[-1] if self._functions else node
        name = node.func.attr if isinstance(node.func, ast.Attribute) else dotted(node.func)
        function = getattr(scope, "name", "")
        is_awaited = id(node) in self._awaited
        # A limit that is handed over is kept by whoever gets it.
        is_limited = self._limits > 0 or any(_names_a_field(value) for value in node.args)
        is_shielded = self._shields > 0
        self.found.append(Call(node, name, function, scope, is_awaited, is_limited, is_shielded))
        self.generic_visit(node)


def _is_scope(call: ast.Call) -> bool:
    return dotted(call.func).split(".")[-1] in SCOPES


def _has_shield(call: ast.Call) -> bool:
    shield = next((k.value for k in call.keywords if k.arg == "shield"), None)
    return isinstance(shield, ast.Constant) and shield.value is True


def _calls(source: Source) -> list[Call]:
    finder = _Finder()
    finder.visit(source.tree)
    return finder.found


# --- limits come from the table ------------------------------------------------------------


def own_limits(source: Source) -> list[str]:
    """Find time scopes and ``timeout`` arguments whose limit is not one of the table's."""
    return [
        f"{source.at(call.node)} {call.function} has a limit of its own: {ast.unparse(limit)}"
        for call in _calls(source)
        if (limit := _limit_of(call.node)) is not None
        and not _is_from_table(limit, call.scope)
        and not call.is_shielded
        and f"{source.module}.{call.function}" not in OWN_LIMITS
    ]


def _limit_of(call: ast.Call) -> ast.expr | None:
    """The time limit that a call gives to a wait, or None if it gives none."""
    if _is_scope(call) and call.args:
        return call.args[0]
    return next((k.value for k in call.keywords if k.arg in ("timeout", "timeout_s")), None)


def _is_from_table(limit: ast.expr, scope: ast.AST) -> bool:
    """A limit is the table's if it names a field, or a time (``_s``) that the caller passed in.

    A default that is a number is a limit of the function's own.
    """
    names = {node.id for node in ast.walk(limit) if isinstance(node, ast.Name)}
    values = [limit, *_assigned(scope, names)]
    passed = _passed(scope)
    used = {n.id for value in values for n in ast.walk(value) if isinstance(n, ast.Name)}
    return any(map(_names_a_field, values)) or bool(used & passed)


def _passed(scope: ast.AST) -> set[str]:
    """Parameters that are times, those with a number as default left out."""
    if not isinstance(scope, Function):
        return set()
    arguments = scope.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = zip(reversed(positional), reversed(arguments.defaults), strict=False)
    pairs = [*defaults, *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    numbers = {a.arg for a, default in pairs if default is not None and _is_number(default)}
    every = {argument.arg for argument in (*positional, *arguments.kwonlyargs)}
    return {name for name in every if name.endswith("_s")} - numbers


def _is_number(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and isinstance(value.value, int | float)


def _assigned(scope: ast.AST, names: set[str]) -> Iterator[ast.expr]:
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign):
            targets = {target.id for target in node.targets if isinstance(target, ast.Name)}
            if targets & names:
                yield node.value


def _names_a_field(value: ast.expr) -> bool:
    attributes = (node.attr for node in ast.walk(value) if isinstance(node, ast.Attribute))
    return any(attribute in Deadlines.model_fields for attribute in attributes)


# --- waits have a limit --------------------------------------------------------------------


def unlimited_waits(package: Iterable[Source], outside: set[str]) -> list[str]:
    """Find awaited outside calls with no time scope around them, nor around all their callers."""
    calls = [(source, call) for source in package for call in _calls(source)]
    limited = _always_limited([call for _, call in calls])
    return [
        f"{source.at(call.node)} {call.function} waits for {call.name} without a limit"
        for source, call in calls
        if call.is_awaited
        and call.name in outside
        and not call.is_limited
        and call.function not in limited
        and f"{source.module}.{call.function}" not in ENDED_OTHERWISE
    ]


def _always_limited(calls: list[Call]) -> set[str]:
    """Names of functions that are only ever called under a limit, directly or through others."""
    limited: set[str] = set()
    while True:
        callers: dict[str, list[Call]] = {}
        for call in calls:
            callers.setdefault(call.name, []).append(call)
        more = {
            name
            for name, sites in callers.items()
            if all(site.is_limited or site.function in limited for site in sites)
        }
        if more == limited:
            return limited
        limited = more


@pytest.mark.parametrize("package", EVERYWHERE)
def test_limits_come_from_the_table(package: str) -> None:
    assert [finding for source in sources(package) for finding in own_limits(source)] == []


@pytest.mark.parametrize("package", OUTSIDE_CALLS)
def test_every_wait_for_another_party_is_limited(package: str) -> None:
    package_sources = [s for s in sources("node") if is_inside(s.module, [package])]
    assert package_sources
    assert unlimited_waits(package_sources, OUTSIDE_CALLS[package]) == []


def test_exceptions_are_still_needed() -> None:
    """A name on a list of exceptions that no longer is one leaves the list."""
    functions = {
        f"{source.module}.{call.function}" for s in EVERYWHERE for source in sources(s)
        for call in _calls(source)
    }  # fmt: skip
    assert {*OWN_LIMITS, *ENDED_OTHERWISE} <= functions


@pytest.mark.parametrize(
    "text",
    [
        "with trio.fail_after(5):\n    pass",
        "LIMIT_S = 5\nasync def f():\n    with trio.move_on_after(LIMIT_S):\n        pass",
        "async def f(client):\n    await client.get('/', timeout=3)",
        "async def f(self):\n    with trio.fail_after(self.patience_s):\n        pass",
        "async def f(limit_s=5.0):\n    with trio.fail_after(limit_s):\n        pass",
        "with trio.move_on_after(1):\n    with trio.CancelScope(shield=True):\n        pass",
    ],
)
def test_own_limit_is_found(text: str) -> None:
    assert own_limits(from_text(text))


@pytest.mark.parametrize(
    "text",
    [
        "async def f(d):\n    with trio.fail_after(d.dial_s):\n        pass",
        "async def f(limit_s):\n    with trio.fail_after(limit_s):\n        pass",
        "async def f(d):\n    x = d.dial_s / 2\n    with trio.fail_after(x):\n        pass",
        "with trio.move_on_after(1, shield=True):\n    pass",
        "with trio.CancelScope(shield=True):\n    with trio.move_on_after(1):\n        pass",
    ],
)
def test_limit_of_the_table_is_accepted(text: str) -> None:
    assert own_limits(from_text(text)) == []


def test_unlimited_wait_is_found() -> None:
    text = "async def f(stream):\n    return await stream.read(4)"
    assert unlimited_waits([from_text(text)], {"read"})


def test_a_limit_around_one_of_two_callers_is_not_enough() -> None:
    text = (
        "async def f(stream):\n    return await stream.read(4)\n"
        "async def g(d):\n    with trio.fail_after(d.dial_s):\n        await f(1)\n"
    )
    assert unlimited_waits([from_text(text)], {"read"}) == []
    assert unlimited_waits([from_text(text + "async def h():\n    await f(1)\n")], {"read"})


def test_a_limit_outside_a_nested_function_does_not_count() -> None:
    text = (
        "async def f(s, d):\n    with trio.fail_after(d.dial_s):\n"
        "        async def g():\n            await s.read(4)\n        n.start_soon(g)\n"
    )
    assert unlimited_waits([from_text(text)], {"read"})
