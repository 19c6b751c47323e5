"""Whom the demo's chaos kills, and what it tells of those who come instead."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

from cli.chaos import Chaos
from node.status import NodeStatus


class Swarm:
    """Five stages of two holders; who is killed is gone, who is spawned serves nothing yet."""

    def __init__(self, method: str = "checkfree") -> None:
        self.manifest = SimpleNamespace(num_stages=5, recovery=SimpleNamespace(method=method))
        self.stages = {f"stage-{k}-{x}": k for k in range(1, 6) for x in "ab"}
        self.num_spawned = 0

    def kill(self, name: str) -> None:
        del self.stages[name]

    def spawn(self, role: str) -> None:
        assert role == "volunteer"
        self.num_spawned += 1

    def nodes(self) -> list[tuple[str, NodeStatus | None]]:
        return [("data-1", serving(0)), *((n, serving(k)) for n, k in self.stages.items())]


def serving(stage: int, origin: str = "the seed, at step 0") -> NodeStatus:
    return NodeStatus(
        peer_id="p", swarm="s", name="n", role="volunteer", stage=stage, state="training",
        state_origin=origin,
    )  # fmt: skip


def heal(swarm: Swarm) -> None:
    swarm.stages = Swarm().stages


def test_without_a_share_nobody_dies() -> None:
    swarm = Swarm()
    chaos = Chaos(swarm, 0.0, 1)
    for step in range(100):
        chaos.look(swarm.nodes(), [step], is_over=False)
    assert (len(swarm.stages), chaos.losses) == (10, [])


def test_it_strikes_in_its_share_of_the_steps_and_sometimes_at_both_holders() -> None:
    swarm = Swarm()
    chaos = Chaos(swarm, 0.2, 1)
    for step in range(1000):
        heal(swarm)
        chaos.look(swarm.nodes(), [step], is_over=False)
    assert 150 < len(chaos.losses) < 250
    both = [loss.stage for loss in chaos.losses if loss.was_last]
    assert 15 < len(both) < 75
    assert set(both) == {2, 3, 4}
    assert set(Counter(loss.stage for loss in chaos.losses)) == {1, 2, 3, 4, 5}
    assert chaos.num_killed == swarm.num_spawned == len(chaos.losses) + len(both)


@pytest.mark.parametrize("method", ["none", "checkfree"])
def test_it_leaves_what_nobody_could_rebuild(method: str) -> None:
    swarm = Swarm(method)
    chaos = Chaos(swarm, 1.0, 1)
    for step in range(100):
        chaos.look(swarm.nodes(), [step], is_over=False)
    left = Counter(swarm.stages.values())
    assert left[1] >= 1
    assert left[5] >= 1
    lost = [k for k in range(1, 6) if not left[k]]
    assert lost == [] if method == "none" else all(k + 1 not in lost for k in lost)


def test_it_tells_who_took_over_and_from_where_the_state_came() -> None:
    swarm = Swarm()
    chaos = Chaos(swarm, 1.0, 1)
    chaos.look(swarm.nodes(), [3], is_over=False)
    (loss,) = chaos.losses
    assert (loss.step, loss.healed) == (4, "")
    assert list(loss.untold()) == [
        f"killed {', '.join(loss.names)} of stage {loss.stage} in step 5"
    ]
    chaos.look(swarm.nodes(), [], is_over=False)
    assert loss.healed == ""
    origin = "the mean of stages 2 and 4, at step 4"
    newcomer = ("spare-a", serving(loss.stage, origin))
    chaos.look([*swarm.nodes(), newcomer], [], is_over=False)
    assert loss.healed.startswith("spare-a after ")
    assert loss.healed.endswith(origin)
    assert len(list(loss.untold())) == 1
    assert list(loss.untold()) == []


def test_the_end_is_left_in_peace() -> None:
    swarm = Swarm()
    chaos = Chaos(swarm, 1.0, 1)
    chaos.look(swarm.nodes(), [9], is_over=True)
    assert chaos.losses == []
