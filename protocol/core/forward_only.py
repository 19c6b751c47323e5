"""What a data node sends through the swarm without a way back: validation."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import trio

from protocol.core.context import Context
from protocol.core.flow import VALIDATION_SLOTS
from protocol.core.window import Window

if TYPE_CHECKING:
    from protocol.core.data_flow import DataFlow


class ForwardOnly:
    """The forward passes of one step at its data node, under the weights at the step's start."""

    def __init__(self, ctx: Context, flows: DataFlow) -> None:
        self._ctx = ctx
        self._flows = flows
        self.validation_loss: float | None = None

    async def validate_if_due(self) -> None:
        """The mean loss of the held-out microbatches that came through, once a step."""
        decision, data = self._flows.decision, self._ctx.manifest.data
        is_due = data.eval_every and (decision.step % data.eval_every == 0 or decision.is_final)
        if not is_due or self.validation_loss is not None:
            return
        losses: list[float] = []
        room = Window(self._flows.window, self._ctx.window_changed)
        async with trio.open_nursery() as nursery:
            for index in range(data.eval_microbatches):
                await room.acquire()
                nursery.start_soon(self._validate_one, index, losses, room)
        if losses:
            self.validation_loss = math.fsum(losses) / len(losses)
            self._ctx.observer.gauge("validation_loss", self.validation_loss)

    async def _validate_one(self, index: int, losses: list[float], room: Window) -> None:
        ctx = self._ctx
        flow = self._flows.new_flow(VALIDATION_SLOTS + index, "eval")
        flow.output = await ctx.compute("embed", lambda: ctx.edge.embed_validation(flow.id, index))
        if await self._flows.attempt(flow):
            losses.append(flow.loss)
        await self._flows.give_up(flow)
        room.release()
