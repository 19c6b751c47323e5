"""Valid messages that make no sense, from strangers and members, in whatever state a node is."""

from __future__ import annotations

from random import Random

import pytest
import torch
import trio
from fuzz_kit import LEAVES, absurd
from simulated_swarms import toy_swarm

from protocol.errors import PeerError, ProtocolViolation
from protocol.keys import PeerId
from protocol.manifest import Manifest
from protocol.messages import ALL_MESSAGES, Message, StepClose
from protocol.ports import Tensor
from protocol.simulation.adapter import address_of
from protocol.simulation.checks import check_exactly_once, check_law, check_shares
from protocol.simulation.cores import node_core
from protocol.simulation.host import simulation_key
from protocol.simulation.toy_stage import toy_stage
from protocol.simulation.world import NodePlan, Result, Runnable, SimulatedNode, Simulation
from protocol.step.decision import check_close

STAGES = (0, 0, 1, 1, 1, 2, 2, 2)
PEERS = tuple(simulation_key(index).peer_id for index in range(len(STAGES) + 1))
PAUSE_S = 0.05
TENSORS = (
    torch.zeros(1, 1, 4), torch.full((1, 1, 4), torch.nan), torch.ones(2), torch.zeros(0),
    torch.full((1, 1, 4), torch.inf), torch.arange(4), torch.zeros(1, 1, 4, dtype=torch.bfloat16),
    torch.zeros((), dtype=torch.uint8), torch.zeros(3, 0, 5), torch.ones(20, dtype=torch.uint8),
)  # fmt: skip


class Attacker:
    """Sends to everybody one message of each kind after the other, for as long as it lives."""

    def __init__(self, simulation: Simulation, node: SimulatedNode, digests: tuple[str, ...]):
        self._node, self._rng = node, Random(node.rng.random())
        numbers = tuple(range(5))
        self._leaves = (*LEAVES, *numbers * 3, *PEERS * 2, *digests)
        self._peers = tuple(peer for peer in PEERS[:-1] if peer != node.key.peer_id)

    async def run(self) -> None:
        """Attack; whoever ends the session is dialled again."""
        for peer in self._peers:
            self._node.network.introduce(peer, (address_of(peer),))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._swallow)
            for peer in self._peers:
                nursery.start_soon(self._attack, peer)

    async def save(self) -> None:
        """It has nothing to keep."""

    async def _swallow(self) -> None:
        async for _ in self._node.network.events:
            pass

    async def _attack(self, peer: PeerId) -> None:
        while True:
            for model in ALL_MESSAGES:
                await trio.sleep(PAUSE_S * self._rng.random())
                message: Message = absurd(model, self._rng, self._leaves)
                with trio.move_on_after(1.0):
                    await self._try(peer, message, self._tensors(model))

    def _tensors(self, model: type[Message]) -> list[Tensor]:
        return [self._rng.choice(TENSORS)] * (model.max_tensors * self._rng.choice((1, 1, 1, 0)))

    async def _try(self, peer: PeerId, message: Message, tensors: list[Tensor]) -> None:
        try:
            await self._node.network.send(peer, message, tensors)
        except PeerError:
            await trio.sleep(PAUSE_S)


class Turncoat:
    """A node that works as it should and attacks beside it."""

    def __init__(self, core: Runnable, attacker: Attacker) -> None:
        self._core, self._attacker = core, attacker

    async def run(self) -> None:
        """Until the work is done."""
        async with trio.open_nursery() as nursery:
            for peer in self._attacker._peers:
                nursery.start_soon(self._attacker._attack, peer)
            await self._core.run()
            nursery.cancel_scope.cancel()

    async def save(self) -> None:
        """Like any node."""
        await self._core.save()


def play(seed: int, hostile: int, knows_digests: bool, limit_s: float) -> Result:
    def build(simulation: Simulation, node: SimulatedNode) -> Runnable:
        if node.index != hostile:
            return node_core(simulation, node)
        manifest = simulation.manifest.manifest
        digests = tuple(toy_stage(manifest, stage).digest for stage in range(3))
        attacker = Attacker(simulation, node, digests * 3 if knows_digests else ())
        is_stranger = hostile == len(STAGES)
        return attacker if is_stranger else Turncoat(node_core(simulation, node), attacker)

    plans = [NodePlan(stage) for stage in (*STAGES, 1)[: max(len(STAGES), hostile + 1)]]
    simulation = toy_swarm(steps=4, quota=6, min_holders=2, seed=seed, plans=tuple(plans))
    simulation._build = build
    result = simulation.run(limit_s, settle_s=0.1)
    assert [node.failure for node in result.nodes if node.failure] == []
    return result


def is_signed(close: Message, manifest: Manifest) -> bool:
    """Whether its data node really said so."""
    assert isinstance(close, StepClose)
    try:
        check_close(close, manifest.swarm_id)
    except ProtocolViolation:
        return False
    return True


@pytest.mark.parametrize("seed", range(2))
def test_a_stranger_that_says_anything_changes_no_number(seed: int) -> None:
    result = play(seed, len(STAGES), False, 30.0)
    assert result.is_finished
    manifest = toy_swarm(steps=4, quota=6, min_holders=2).manifest.manifest
    closes = [close for close in result.messages["step_close"] if is_signed(close, manifest)]
    check_law(manifest, result.moves, closes)
    check_shares(check_exactly_once(result.moves), result.decisions)


@pytest.mark.parametrize("seed", range(2))
def test_a_stranger_that_says_that_it_holds_the_state_ends_no_node(seed: int) -> None:
    play(seed, len(STAGES), True, 10.0)


@pytest.mark.parametrize("member", [1, 3])
def test_a_member_that_says_anything_ends_no_node(member: int) -> None:
    """What it computes may be wrong, and nobody checks that yet; but it kills nobody."""
    play(member, member, True, 10.0)
