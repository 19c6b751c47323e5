"""Looks from outside which byte patterns a process has in its memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

_BLOCK_BYTES = 1 << 24


def patterns_in_memory(pid: int, patterns: Mapping[int, bytes]) -> set[int]:
    """Return the keys of the patterns that stand in a writable mapping of the process.

    The kernel lets a parent read its child's memory, without stopping it.
    """
    overlap = max(map(len, patterns.values()))
    found: set[int] = set()
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for start, end in _writable_mappings(pid):
            for at in range(start, end, _BLOCK_BYTES):
                block = b""
                with suppress(OSError):  # a mapping that went away, or a guard page
                    memory.seek(at)
                    block = memory.read(min(_BLOCK_BYTES + overlap, end - at))
                found |= {key for key, pattern in patterns.items() if pattern in block}
    return found


def _writable_mappings(pid: int) -> Iterator[tuple[int, int]]:
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        addresses, permissions, *_ = line.split()
        if permissions.startswith("rw"):
            start, end = (int(address, 16) for address in addresses.split("-"))
            yield start, end
