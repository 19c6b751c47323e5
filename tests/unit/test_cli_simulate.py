"""`shoal simulate routing`: its numbers, its pictures, and what a mistake is answered with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.main import run
from cli.simulate import Policy
from protocol.simulation.routing.trial import POLICY_NAMES

ASKED = {
    "flow", "optimal_flow", "cost", "optimal_cost", "ratio", "greedy_cost", "rounds_to_max_flow",
    "rounds_to_converge", "messages_per_node_tick", "seconds",
}  # fmt: skip
SMALL = ["simulate", "routing", "--nodes", "10", "--stages", "3", "--ticks", "40"]


def result(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, object]:
    """Run it with --json and return what it printed."""
    assert run([*SMALL, "--json", *options]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_json_has_what_scripts_need(capsys: pytest.CaptureFixture[str]) -> None:
    found = result(capsys)
    assert set(found) >= ASKED
    assert found["flow"] == found["optimal_flow"]
    assert found["ratio"] == pytest.approx(found["cost"] / found["optimal_cost"], abs=1e-5)  # type: ignore[operator]


def test_equal_seeds_print_equal_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    first, again, other = (result(capsys, "--seed", seed) for seed in "112")
    assert {k: v for k, v in first.items() if k not in ("seconds", "router_cpu_s")} == {
        k: v for k, v in again.items() if k not in ("seconds", "router_cpu_s")
    }
    assert first["trace"] != other["trace"]


def test_policies_are_those_of_the_simulator() -> None:
    assert [policy.value for policy in Policy] == list(POLICY_NAMES)


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_table_names_policy_and_optimum(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SMALL, "--policy", policy, "--burst", "0.3", "--network", "regions"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["routes", "by"]
    assert lines[1].startswith(policy)
    assert lines[3].startswith("optimum")
    assert "burst" in lines[-1]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two drawn pictures; matplotlib keeps its fonts open, which is no leak of a test's."""
    folder = tmp_path_factory.mktemp("pictures") / "new"
    assert run([*SMALL, "--burst", "0.3", "--data-nodes", "2", "--picture", str(folder)]) == 0
    return folder


def test_pictures_are_drawn(pictures: Path) -> None:
    assert sorted(path.name for path in pictures.iterdir()) == ["convergence.png", "network.png"]
    for path in pictures.iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")


def test_a_saved_network_gives_the_same_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "new" / "network.json"
    drawn = result(capsys, "--network", "regions", "--save-network", str(file))
    words = ["simulate", "routing", "--ticks", "40", "--json", "--network", str(file)]
    assert run(words) == 0
    assert json.loads(capsys.readouterr().out)["trace"] == drawn["trace"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--nodes", "8"], "8 nodes are too few"),
        (["--network", "nowhere.json"], "there is no network file 'nowhere.json'"),
        (["--network", __file__], "the network file is wrong: Invalid JSON"),
        (["--network", __file__, "--nodes", "9"], "a network file says itself"),
        (["--policy", "swam"], "'swam' is not one of"),
        (["--loss", "1.5"], "'--loss'"),
        (["--nodes", "many"], "'--nodes'"),
        (["--picture", "/dev/null/x"], "cannot write to /dev/null/x: Not a directory"),
        (["--save-network", "/dev/null/x/n.json"], "cannot write to /dev/null/x"),
    ],
)
def test_a_mistake_is_told_in_two_lines(
    options: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["simulate", "routing", *options]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["error[config]", "remedy"]
    assert told in lines[0]


TRAIN = ["simulate", "training", "--nodes", "13", "--stages", "3", "--steps", "2"]


def test_training_compares_policies_on_the_same_crashes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ["--churn", "0.2", "--policy", "gwtf", "--policy", "random"]
    assert run([*TRAIN, *options, "--microbatches", "8", "--json", "--picture", str(tmp_path)]) == 0
    gwtf, chance = json.loads(capsys.readouterr().out)
    assert (gwtf["policy"], chance["policy"]) == ("gwtf", "random")
    assert gwtf["microbatches"] == chance["microbatches"] == 16
    assert gwtf["crashes"] + gwtf["spared"] == chance["crashes"] + chance["spared"] > 0
    assert set(gwtf["step_s"]) == {"mean", "median", "p95"}
    for name in ("gwtf", "random"):
        assert (tmp_path / f"training-{name}.png").read_bytes().startswith(b"\x89PNG")


def test_training_prints_a_row_for_every_policy(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*TRAIN, "--microbatches", "6"]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n{name} " in printed for name in POLICY_NAMES)
