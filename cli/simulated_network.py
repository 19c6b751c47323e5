"""The network that `shoal simulate` runs on: drawn, measured or from a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from protocol.simulation.routing.network import RoutingNetwork

Shape = tuple[int | None, int | None, int | None]
_NODES, _STAGES, _DATA_NODES = 33, 8, 1


def simulated_network(
    source: str, shape: Shape, seed: int, *, is_arithmetic: bool
) -> RoutingNetwork:
    """Return what ``--network`` names, of this shape (nodes, stages, data nodes) or the usual one.

    Raises ConfigError if a file is not there or malformed, or a shape is given beside it.
    """
    from dataclasses import replace

    from protocol.simulation.routing.families import in_regions, of_size

    num_nodes, num_stages, num_data_nodes = (
        given or default
        for given, default in zip(shape, (_NODES, _STAGES, _DATA_NODES), strict=True)
    )
    if source == "random":
        drawn = of_size(num_nodes, num_stages, num_data_nodes).network(seed)
        return replace(drawn, is_arithmetic=is_arithmetic)
    if source == "regions":
        drawn = in_regions(num_nodes, num_stages, seed, num_data_nodes=num_data_nodes)
        return replace(drawn, is_arithmetic=is_arithmetic)
    return _from_file(Path(source), shape, is_arithmetic=is_arithmetic)


def _from_file(path: Path, shape: Shape, *, is_arithmetic: bool) -> RoutingNetwork:
    from protocol.errors import ConfigError
    from protocol.simulation.routing.network_file import parse_network

    if any(given is not None for given in shape):
        raise ConfigError(
            "a network file says itself how many nodes, stages and data nodes there are",
            "Leave out --nodes, --stages and --data-nodes.",
        )
    if not path.is_file():
        raise ConfigError(
            f"there is no network file {str(path)!r}",
            "Name a file, or take `--network random` or `--network regions`.",
        )
    return parse_network(path.read_bytes(), is_arithmetic=is_arithmetic)
