"""Text through the swarm, token by token: each stage keeps the keys and values of what came before.

The data node keeps the tokens. If a holder on the route is lost, another one that keeps the same
weights takes its place and the tokens so far go through once more: what is written stays the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import trio

from protocol.core.session import Session
from protocol.errors import NonFinite, ProtocolViolation, Unreachable
from protocol.keys import PeerId
from protocol.messages import Extend
from protocol.ports import Tensor


class Generation:
    """One text under the weights of one step; ``room`` is the most tokens that it looks at.

    When the text grows past that, its older half is forgotten and the rest goes through once more.
    """

    def __init__(self, session: Session, room: int) -> None:
        self._session, self._room = session, room
        self._attempt = -1
        self._route: tuple[PeerId, ...] = ()
        self._bad: set[PeerId] = set()
        self._first = self._end = 0  # the tokens that the caches hold, by their place in the text

    @property
    def step(self) -> int:
        """The step whose weights it uses."""
        return self._session.step

    async def next_logits(self, tokens: Sequence[int]) -> Tensor:
        """Return the logits [V] of the token that follows ``tokens``, which only grow.

        Raises Unreachable if some stage has no holder left that keeps the weights.
        """
        if len(tokens) - self._first > self._room:
            self._restart(len(tokens) - max(1, self._room // 2))
        while True:
            if not self._route:
                self._restart(self._first)
                self._route = self._choose()
            logits = await self._pass_through(tokens)
            if logits is not None:
                self._end = len(tokens)
                return logits
            self._route = ()

    def _restart(self, first: int) -> None:
        self._attempt += 1
        self._first = self._end = first

    def _choose(self) -> tuple[PeerId, ...]:
        session = self._session
        bad = self._bad | session.gone
        route = []
        for number, stage in session.stages.items():
            fit = sorted(stage.held - bad, key=lambda peer: peer not in self._route)
            if not fit:
                raise Unreachable(
                    f"no holder of stage {number} is left that keeps the weights of step "
                    f"{session.step}",
                    "Generate again: it begins with the weights of now.",
                )
            route.append(session.ctx.rng.choice(fit))
        return tuple(route)

    async def _pass_through(self, tokens: Sequence[int]) -> Tensor | None:
        """Send what is new through all stages; None if somebody on the route failed."""
        session, ctx = self._session, self._session.ctx
        new_BT = torch.tensor([list(tokens[self._end :])], dtype=torch.int64)
        h_BTW = await ctx.compute("embed", lambda: ctx.edge.embed_tokens(session.state, new_BT))
        message = Extend(
            step=session.step, owner=ctx.me, session=session.number, stage=1,
            attempt=self._attempt, position=self._end - self._first, route=self._route[1:],
        )  # fmt: skip
        session.answers.clear()
        session.stuck.clear()
        if not await ctx.try_send(self._route[0], message, (h_BTW,)):
            self._bad.add(self._route[0])
            return None
        with trio.move_on_after(ctx.deadlines.flow_s):
            await session.news.until(self._is_over)
        return await self._outcome()

    def _is_over(self) -> bool:
        session, attempt = self._session, self._attempt
        is_lost = not session.gone.isdisjoint(self._route)
        return attempt in session.answers or attempt in session.stuck or is_lost

    async def _outcome(self) -> Tensor | None:
        session, ctx = self._session, self._session.ctx
        output_BTW = session.answers.get(self._attempt)
        if output_BTW is None:
            stuck = session.stuck.get(self._attempt)
            if stuck is not None:
                self._bad.add(stuck.peer)
            elif session.gone.isdisjoint(self._route):
                self._bad.update(self._route)  # nobody says who is silent
            return None
        try:
            logits_BV = await ctx.compute(
                "edge", lambda: ctx.edge.logits(session.state, output_BTW)
            )
        except (NonFinite, ProtocolViolation) as error:
            ctx.observer.count("errors", code=error.code)
            self._bad.add(self._route[-1])
            return None
        return logits_BV[0]
