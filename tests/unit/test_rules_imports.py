"""The rule of dependency: cli -> node -> protocol, stages; and who may import which library."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable

import pytest
from source_tree import PACKAGES, Source, dotted, from_text, imports, is_inside, sources

# What each package may import of the project, besides itself.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "cli": ("node", "protocol", "stages"),
    "node": ("protocol", "stages"),
    "protocol": (),
    "stages": ("protocol.manifest", "protocol.errors"),
}
# The pure core does no I/O, starts no threads and reads no clock but trio's.
NOT_IN_PROTOCOL = (
    "asyncio", "hivemind", "httpx", "libp2p", "multiprocessing", "select", "selectors", "signal",
    "socket", "subprocess", "threading", "time", "torch.nn",
)  # fmt: skip
# The program that runs hivemind: started by exec, imported by nobody.
SIDECAR_CHILD = "node.sidecar.child"
LIBP2P_OWNER = "node.transport"

Rule = Callable[[Source], list[str]]


def layering(source: Source) -> list[str]:
    """A package imports only what lies below it."""
    allowed = (source.package, *MAY_IMPORT[source.package])
    return [
        f"{source.at(node)} imports {name}"
        for node, name in imports(source)
        if is_inside(name, PACKAGES) and not is_inside(name, allowed)
    ]


def pure_protocol(source: Source) -> list[str]:
    """``protocol`` imports nothing that reaches the world, nor torch.nn, nor shared randomness."""
    if source.package != "protocol":
        return []
    used = [(node, name) for node, name in imports(source) if name != "random.Random"]
    used += [
        (node, dotted(node))
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and dotted(node).startswith(("torch.nn", "random."))
    ]
    return [
        f"{source.at(node)} uses {name}"
        for node, name in used
        if is_inside(name, NOT_IN_PROTOCOL)
        or (name.startswith("random.") and name != "random.Random")
    ]


def library_owners(source: Source) -> list[str]:
    """Only the side-car's child imports hivemind; only the transport imports libp2p."""
    owners = {"hivemind": SIDECAR_CHILD, "libp2p": LIBP2P_OWNER}
    return [
        f"{source.at(node)} imports {name}"
        for node, name in imports(source)
        for library, owner in owners.items()
        if is_inside(name, [library]) and not is_inside(source.module, [owner])
    ]


RULES: tuple[Rule, ...] = (layering, pure_protocol, library_owners)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_sources_keep_rule(rule: Rule) -> None:
    assert [finding for source in sources() for finding in rule(source)] == []


@pytest.mark.parametrize(
    ("rule", "module", "text"),
    [
        (layering, "node.x", "from cli import output"),
        (layering, "protocol.x", "def f():\n    import stages.llama"),
        (layering, "stages.x", "from protocol.messages import Forward"),
        (layering, "stages.x.y", "from ..  import x\nfrom ...node import compute"),
        (pure_protocol, "protocol.x", "import socket"),
        (pure_protocol, "protocol.x", "from torch import nn"),
        (pure_protocol, "protocol.x", "import torch\ny = torch.nn.functional.silu"),
        (pure_protocol, "protocol.x", "import random\ny = random.random()"),
        (library_owners, "node.sidecar.supervisor", "from hivemind.dht import DHTNode"),
        (library_owners, "node.daemon", "import libp2p"),
    ],
)
def test_rule_refuses(rule: Rule, module: str, text: str) -> None:
    assert rule(from_text(text, module))


@pytest.mark.parametrize(
    ("rule", "module", "text"),
    [
        (layering, "stages.x", "from protocol.manifest import Manifest"),
        (layering, "cli.x", "from node import paths"),
        (pure_protocol, "protocol.x", "import random\nr = random.Random(3)\nr.random()"),
        (library_owners, SIDECAR_CHILD, "from hivemind.dht import DHTNode"),
        (library_owners, "node.transport.host", "import libp2p"),
    ],
)
def test_rule_allows(rule: Rule, module: str, text: str) -> None:
    assert rule(from_text(text, module)) == []


def _reached(start: Iterable[str]) -> set[str]:
    """The project's modules that importing ``start`` may load, lazily imported ones included."""
    by_module = {source.module: source for source in sources()}
    reached: set[str] = set()
    queue = list(start)
    while queue:
        module = queue.pop()
        if module in reached or module not in by_module:
            continue
        reached.add(module)
        queue += _loaded_by(by_module[module])
    return reached


def _loaded_by(source: Source) -> list[str]:
    """Every prefix of an imported name: its packages run too, and it may itself be a module."""
    return [
        ".".join(parts[:length])
        for _, name in imports(source)
        if is_inside(name, PACKAGES)
        for parts in [name.split(".")]
        for length in range(1, len(parts) + 1)
    ]


def test_hivemind_and_libp2p_never_meet_in_one_process() -> None:
    """The two register the same protobuf symbol: neither program may reach the other's library."""
    child = {s.module for s in sources("node") if is_inside(s.module, [SIDECAR_CHILD])}
    everything_else = {s.module for s in sources()} - child
    assert child, f"{SIDECAR_CHILD} does not exist"
    assert not _reached(everything_else) & child
    assert not [m for m in _reached(child) if is_inside(m, [LIBP2P_OWNER])]


def test_every_package_folder_says_what_lives_there() -> None:
    missing = [
        source.name
        for source in sources()
        if source.path.name == "__init__.py" and not ast.get_docstring(source.tree)
    ]
    folders = {source.path.parent for source in sources()}
    missing += [str(folder) for folder in folders if not (folder / "__init__.py").exists()]
    assert missing == []
