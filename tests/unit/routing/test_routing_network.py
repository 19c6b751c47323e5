"""Networks: the cost of a link, the families, the regions, and the file that anybody can bring."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from source_tree import ROOT

from protocol.errors import ConfigError
from protocol.simulation.routing.families import N33, N97, N97_WIDE, Family, in_regions
from protocol.simulation.routing.network import assign_stages
from protocol.simulation.routing.network_file import parse_network, to_file
from protocol.simulation.routing.regions import DTFM, SKIPPIPE


def file(**changes: Any) -> dict[str, Any]:
    """A data node, two holders of stage 1 and one of stage 2."""
    names = [("d", 0, 0), ("a", 1, 2), ("b", 1, 1), ("c", 2, 4)]
    whole: dict[str, Any] = {
        "nodes": [
            {"name": name, "stage": stage, "capacity": capacity, "compute_s": 0.5}
            for name, stage, capacity in names
        ],
        "latency_s": [[0.0, 0.1, 0.1, 0.1]] * 4,
        "bandwidth_bytes_s": [[1e6] * 4] * 4,
        "payload_bytes": 1e6,
    }
    return whole | changes


def test_cost_of_a_link_has_both_directions_and_half_of_both_computers() -> None:
    latency = [[0.0, 0.1, 0.1, 0.1], [0.3, 0.0, 0.1, 0.1], [0.1] * 4, [0.1] * 4]
    up_and_down = [[1e6, 4e6, 1e6, 1e6], [1e6] * 4, [1e6] * 4, [1e6] * 4]
    text = json.dumps(file(latency_s=latency, bandwidth_bytes_s=up_and_down))
    harmonic = parse_network(text)
    assert harmonic.cost_s[0, 1] == harmonic.cost_s[1, 0]
    assert harmonic.cost_s[0, 1] == pytest.approx(0.5 + (0.1 + 0.3) / 2 + (1 / 4 + 1) / 2)
    paper = parse_network(text, is_arithmetic=True)
    assert paper.cost_s[0, 1] == pytest.approx(0.5 + (0.1 + 0.3) / 2 + 2 / (4 + 1))
    assert paper.link_s[0, 1] == pytest.approx(paper.cost_s[0, 1] - 0.5)


def test_arithmetic_mean_flatters_a_home_link_three_times() -> None:
    home = file(latency_s=[[0.0] * 4] * 4)
    home["bandwidth_bytes_s"] = [[1e7] * 4, [1e6] * 4, [1e7] * 4, [1e7] * 4]
    text = json.dumps(home)
    ratio = parse_network(text).link_s[0, 1] / parse_network(text, is_arithmetic=True).link_s[0, 1]
    assert ratio == pytest.approx(3.0, rel=0.02)


def test_demand_is_what_the_smallest_stage_carries_unless_named() -> None:
    assert parse_network(json.dumps(file())).demands == (3, 0, 0, 0)
    nodes = file()["nodes"]
    nodes[0]["demand"] = 2
    named = parse_network(json.dumps(file(nodes=nodes)))
    assert (named.demands, named.max_flow()) == ((2, 0, 0, 0), 2)
    assert named.max_flow([0, 2, 3]) == 1
    assert named.max_flow([0, 1, 2]) == 0


def test_a_node_without_a_stage_goes_where_capacity_is_least() -> None:
    assert assign_stages([0, 1, 2, None, None, None], [0, 5, 2, 1, 4, 3], 2) == (0, 1, 2, 2, 2, 1)
    nodes = file()["nodes"]
    nodes[3]["stage"] = None
    network = parse_network(json.dumps(file(nodes=nodes, stages=2)))
    assert network.stages == (0, 1, 1, 2)


def refusal(text: str | bytes) -> str:
    """Return the cause of a refusal: one short line, with the page as the remedy."""
    with pytest.raises(ConfigError) as caught:
        parse_network(text)
    assert len(caught.value.cause) < 400
    assert "\n" not in caught.value.cause
    assert "docs/network-file.md" in caught.value.hint
    return caught.value.cause


@pytest.mark.parametrize("text", ["", "{", b"\xff\xfe", "[]", "nodes: 3"])
def test_what_is_no_json_object_is_refused(text: str | bytes) -> None:
    assert refusal(text).startswith("the network file is wrong: I")


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"payload_bytes": None}, "payload_bytes: "),
        ({"payload_bytes": -1}, "payload_bytes: "),
        ({"latency_s": [[0.1] * 4] * 3}, "latency_s has 3 rows for 4 nodes"),
        ({"latency_s": [[0.1] * 4] * 3 + [[0.1]]}, "row 3 of latency_s has 1 of 4 numbers"),
        ({"bandwidth_bytes_s": [[0.0] * 4] * 4}, "bandwidth_bytes_s.0.0: "),
        ({"latency_s": [["x"] * 4] * 4}, "latency_s.0.0: "),
        ({"colour": "red"}, "colour: "),
        ({"nodes": []}, "nodes: "),
        ({"stages": 3}, "no node has stage 3"),
        ({"stages": 1}, "'c' has stage 2 of 1"),
    ],
)
def test_a_malformed_file_is_refused_with_its_place(wrong: dict[str, Any], told: str) -> None:
    assert told in refusal(json.dumps(file(**wrong)))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"capacity": -1}, "nodes.1.capacity: "),
        ({"compute_s": 1e9}, "nodes.1.compute_s: "),
        ({"name": ""}, "nodes.1.name: "),
        ({"name": "b"}, "two nodes are called 'b'"),
        ({"demand": 3}, "'a' has a demand"),
        ({"speed": 3}, "nodes.1.speed: "),
    ],
)
def test_a_malformed_node_is_refused_with_its_place(wrong: dict[str, Any], told: str) -> None:
    whole = file()
    whole["nodes"][1] |= wrong
    assert told in refusal(json.dumps(whole))


def test_a_network_without_a_data_node_is_refused() -> None:
    whole = file()
    whole["nodes"][0]["stage"] = 1
    assert "needs a data node" in refusal(json.dumps(whole))


def test_the_file_on_the_page_is_one() -> None:
    page = (ROOT / "docs" / "network-file.md").read_text()
    (text,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    network = parse_network(text)
    assert network.names == ("data", "ann", "bob", "eve")
    assert network.stages == (0, 1, 1, 2), "eve goes where capacity is least"
    assert network.max_flow() == 3


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e400"])
def test_numbers_that_are_none_are_refused(number: str) -> None:
    text = json.dumps(file()).replace('"payload_bytes": 1000000.0', f'"payload_bytes": {number}')
    with pytest.raises(ConfigError):
        parse_network(text)


def test_a_network_where_nothing_can_flow_is_refused() -> None:
    nodes = file()["nodes"]
    nodes[3]["capacity"] = 0
    with pytest.raises(ConfigError, match="nothing can flow"):
        parse_network(json.dumps(file(nodes=nodes)))


def test_a_network_survives_its_file() -> None:
    network = in_regions(20, 4, seed=3, num_data_nodes=2)
    again = parse_network(to_file(network))
    assert np.array_equal(again.cost_s, network.cost_s)
    for field in ("names", "stages", "capacities", "demands", "regions"):
        assert getattr(again, field) == getattr(network, field)


@pytest.mark.parametrize(
    ("family", "num_nodes", "per_stage"), [(N33, 33, 4), (N97, 97, 12), (N97_WIDE, 97, 12)]
)
def test_families_are_those_of_the_spec(family: Family, num_nodes: int, per_stage: int) -> None:
    network = family.network(7)
    assert network.num_nodes == num_nodes
    assert [len(network.holders_of(s)) for s in range(9)] == [1] + [per_stage] * 8
    caps = [network.capacities[i] for i in network.holders]
    assert (min(caps), max(caps)) == family.capacity
    costs = network.cost_s[~np.eye(num_nodes, dtype=bool)]
    low, high = family.cost_s
    assert low <= costs.min() < costs.max() <= high
    assert np.allclose(network.cost_s, network.cost_s.T)
    assert np.array_equal(family.network(7).cost_s, network.cost_s)
    assert network.demands[0] == network.max_flow()
    # Both directions are alike, so both forms of the cost are.
    assert np.allclose(replace(network, is_arithmetic=True).cost_s, network.cost_s)


def test_too_few_nodes_are_refused() -> None:
    with pytest.raises(ConfigError, match="too few"):
        Family(8, num_stages=8).network(0)


def test_regions_are_the_published_tables() -> None:
    latency_s, bandwidth = DTFM.matrices()
    at = {name: k for k, name in enumerate(DTFM.names)}
    assert len(at) == 10
    assert latency_s[at["LON"], at["SYD"]] == latency_s[at["SYD"], at["LON"]] == 0.262
    assert bandwidth[at["SYD"], at["LON"]] == 326e6 / 8
    assert (latency_s[0, 0], bandwidth[0, 0]) == (0.005, 2000e6 / 8)
    latency_s, bandwidth = SKIPPIPE.matrices()
    at = {name: k for k, name in enumerate(SKIPPIPE.names)}
    assert len(at) == 12
    assert latency_s[at["UK"], at["TW"]] == 0.1095
    assert bandwidth[at["NL"], at["UK"]] == 2e6 / 8
    assert (latency_s > 0).all()
    assert (bandwidth > 0).all()
