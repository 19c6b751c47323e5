"""Whatever a core hears, in whatever state: no error leaves it and no weight moves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from random import Random

import pytest
import torch
import trio
from fuzz_kit import LEAVES, absurd, example
from step_kit import PEERS
from test_core_node import ME, NEXT, SWARM, A, D, Node, opening, signed

from protocol.messages import ALL_MESSAGES, Message
from protocol.ports import PeerChange

NUM_ROUNDS = 6
SENDERS = (A, D, ME, NEXT, PEERS[9])
TENSORS = (torch.zeros(1, 1, 4), torch.full((2,), torch.nan), torch.zeros(0, dtype=torch.uint8))
NODES = {"holder": 2, "data node": 1, "authority": 0}


async def unborn(node: Node, nursery: trio.Nursery) -> None:
    """It does not know its stage yet."""


async def waiting(node: Node, nursery: trio.Nursery) -> None:
    """It has a stage, and there is no decision."""
    await node.take_stage(stage_of(node))


async def outside(node: Node, nursery: trio.Nursery) -> None:
    """The swarm trains without it."""
    await waiting(node, nursery)
    others = [(PEERS[6],), (PEERS[7],), (PEERS[8],)]
    node.core._obey(signed(opening(step=3, roster=others)))


async def working(node: Node, nursery: trio.Nursery) -> None:
    """It is in the middle of a step."""
    await waiting(node, nursery)
    node.core._obey(signed(opening()))
    nursery.start_soon(node.core._work)
    await trio.testing.wait_all_tasks_blocked()


async def draining(node: Node, nursery: trio.Nursery) -> None:
    """It leaves with this step."""
    await working(node, nursery)
    node.core.drain()


def stage_of(node: Node) -> int:
    return 1 if node.core._key.peer_id == ME else 0


STATES: tuple[Callable[[Node, trio.Nursery], Awaitable[None]], ...] = (
    unborn, waiting, outside, working, draining,
)  # fmt: skip


@pytest.mark.parametrize("role", NODES)
@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
async def test_no_message_ends_a_core_or_moves_its_state(
    nursery, autojump_clock, state, role: str
) -> None:
    node = Node(nursery, index=NODES[role], stage=None if state is unborn else 0)
    await state(node, nursery)
    member, rng = node.core.member, Random(role)
    assert (member is not None) == (state in (working, draining))
    before = digest_of(node)
    leaves = (*LEAVES, *range(4), *PEERS[:5], *opening().digests, SWARM)
    for _ in range(NUM_ROUNDS):
        for model in ALL_MESSAGES:
            for message in (absurd(model, rng, leaves), example(model)):
                hear(node, rng, message)
        await trio.sleep(1.0)
    await trio.sleep(60.0)
    assert digest_of(node) == before
    # an authority's Paused lets a node go that drains
    assert node.core.member is member or state is draining
    nursery.cancel_scope.cancel()


def hear(node: Node, rng: Random, message: Message) -> None:
    sender = rng.choice(SENDERS)
    tensors = (rng.choice(TENSORS),) * (message.max_tensors * rng.choice((1, 1, 0)))
    if sender != node.core._key.peer_id:
        node.hear(sender, message, tensors)
        node.core._on_change(PeerChange(sender, rng.random() < 0.5))


def digest_of(node: Node) -> str | None:
    holding = node.core._holding
    return holding.ctx.state.digest if holding is not None else None
