"""The messages of averaging: what the holders of a stage tell each other to add up their sums."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from protocol.messages.base import Count, Lane, Message, Stage


class ReducePart(Message):
    """Holder -> owner of a shard: my sum over that shard, or one slot's gradient.

    Tensor: [shard length] fp32. ``place`` is where the part stands in the order of adding.
    """

    kind: Literal["reduce_part"] = "reduce_part"
    lane: ClassVar[Lane] = "bulk"
    max_tensors: ClassVar[int] = 1
    term: Count
    stage: Stage
    shard: Count
    place: Count = 0
    num_microbatches: Count


class ReduceResult(Message):
    """Owner of a shard -> holders: the sum of all parts, the same bytes for all."""

    kind: Literal["reduce_result"] = "reduce_result"
    lane: ClassVar[Lane] = "bulk"
    max_tensors: ClassVar[int] = 1
    term: Count
    stage: Stage
    shard: Count
    num_microbatches: Count


class AverageReport(Message):
    """Holder -> holders of its stage: where I am in this round; repeated until the round is over.

    ``addresses`` are those of its reducer, none while that is not up; ``nonce`` is what its
    sentinels of this attempt are made from; ``is_complete`` says that its result is whole.
    """

    kind: Literal["average_report"] = "average_report"
    term: Count
    stage: Stage
    attempt: Count
    nonce: Annotated[bytes, Field(min_length=16, max_length=16)]
    addresses: Annotated[
        tuple[Annotated[str, Field(max_length=256)], ...], Field(max_length=16)
    ] = ()
    is_complete: bool = False


AVERAGING_MESSAGES = (ReducePart, ReduceResult, AverageReport)
