"""Pinned states and caches of keys and values: what outlives the step, and that it is the same."""

from __future__ import annotations

from hashlib import sha256

import pytest
import torch
from stages_kit import make_blocks, make_edge, make_manifest, normal, run_microbatch

from protocol.errors import NonFinite, ProtocolViolation

PLAIN = make_manifest()
GROUPED = make_manifest(model={"heads": 8, "kv_heads": 2})
ONE_HEAD = make_manifest(model={"heads": 1, "kv_heads": 1})
ODD = make_manifest(
    model={"layers": 3, "width": 30, "heads": 3, "kv_heads": 1, "feed_forward": 37,
           "vocabulary": 259, "context": 13, "rope_base": 5000.0, "norm_epsilon": 1e-6},
    pipeline={"stages": [1, 2]},
)  # fmt: skip
MODELS = {"plain": PLAIN, "grouped": GROUPED, "one head": ONE_HEAD, "odd sizes": ODD}
models = pytest.mark.parametrize("name", MODELS)


def trained(manifest, num_steps: int = 2):
    """An edge and its blocks after some steps, with attention far from uniform."""
    edge, blocks = make_edge(manifest), make_blocks(manifest)
    for step in range(num_steps):
        one_step(edge, blocks, step)
    return edge, blocks


def one_step(edge, blocks, step: int) -> None:
    run_microbatch(edge, blocks, step, 0)
    for stage in (edge, *blocks):
        stage.prepare(stage.gradient(["d"]), 1)
        stage.apply()


@models
@pytest.mark.parametrize("pieces", [(12,), (1,) * 12, (5, 1, 1, 4, 1)])
def test_a_cache_gives_what_the_whole_forward_pass_gives(name: str, pieces) -> None:
    manifest = MODELS[name]
    _, blocks = trained(manifest)
    for block in blocks:
        block._current.data[0].mul_(10)  # so that no token is like another
        h_BTW = normal(1, sum(pieces), manifest.model.width)
        whole = block.forward("w", h_BTW, keep=False)
        cache = block.open_cache(block.pin(2, is_whole=False), sum(pieces))
        parts = [block.extend(cache, piece) for piece in h_BTW.split(pieces, dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-5, atol=1e-5)


def test_two_caches_do_not_meet() -> None:
    block = make_blocks(PLAIN)[0]
    pin = block.pin(0, is_whole=False)
    one, other = block.open_cache(pin, 4), block.open_cache(pin, 4)
    block.extend(one, normal(1, 3, 32, seed=1))
    expected = block.extend(block.open_cache(pin, 4), normal(1, 2, 32))
    assert torch.equal(block.extend(other, normal(1, 2, 32)), expected)
    assert (one.num_tokens, other.num_tokens) == (3, 2)


def test_a_cache_takes_no_more_than_it_has_room_for() -> None:
    block = make_blocks(PLAIN)[0]
    cache = block.open_cache(block.pin(0, is_whole=False), 4)
    block.extend(cache, normal(1, 4, 32))
    for bad in (normal(1, 1, 32), normal(2, 1, 32), normal(1, 1, 31)):
        with pytest.raises(ProtocolViolation):
            block.extend(cache, bad)
    with pytest.raises(NonFinite):
        block.extend(cache, normal(1, 1, 32) * torch.nan)
    assert cache.num_tokens == 4


def test_the_memory_of_a_cache_is_told() -> None:
    block = make_blocks(GROUPED)[1]
    cache = block.open_cache(block.pin(0, is_whole=False), 7)
    assert block.cache_bytes(7) == cache._kept.nbytes


# --- pins ----------------------------------------------------------------------------------


def test_pinned_weights_stay_when_the_stage_goes_on() -> None:
    edge, blocks = trained(PLAIN)
    block = blocks[0]
    before = [leaf.clone() for leaf in block._current.leaves]
    pin = block.pin(2, is_whole=False)
    h_BTW = normal(1, 5, 32)
    expected = block.extend(block.open_cache(pin, 5), h_BTW)
    one_step(edge, blocks, 2)
    assert block.pinned_bytes == 0  # the buffers are still there
    one_step(edge, blocks, 3)
    assert block.pinned_bytes == pin.num_bytes == 4 * block.num_gradients
    one_step(edge, blocks, 4)
    assert all(map(torch.equal, pin.leaves, before))
    assert torch.equal(block.extend(block.open_cache(pin, 5), h_BTW), expected)
    del pin
    assert block.pinned_bytes == 0


def test_the_step_before_can_be_pinned_until_the_next_is_prepared() -> None:
    edge, blocks = trained(PLAIN)
    block = blocks[0]
    assert block.pin(1, is_whole=False).step == 1
    assert block.pin(0, is_whole=False) is None
    assert block.pin(3, is_whole=False) is None
    run_microbatch(edge, blocks, 2, 0)
    block.prepare(block.gradient(["d"]), 1)
    assert block.pin(1, is_whole=False) is None
    block.abandon()
    assert block.pin(1, is_whole=False) is None
    assert block.pin(2, is_whole=False).digest == block.digest


def test_a_state_that_is_fetched_leaves_a_pin_as_it_was() -> None:
    block, donor = make_blocks(PLAIN)[0], trained(PLAIN)[1][0]
    pin = block.pin(0, is_whole=False)
    before = pin.leaves[0].clone()
    for _ in range(2):
        block.import_state(donor.export_state(), donor.digest)
    assert torch.equal(pin.leaves[0], before)


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_whole_state_is_given_in_chunks(goes_on: bool) -> None:
    edge, blocks = trained(PLAIN)
    block = blocks[1]
    pin, expected = block.pin(2, is_whole=True), block.export_state()
    if goes_on:
        one_step(edge, blocks, 2)
        one_step(edge, blocks, 3)
    chunks = [pin.chunk(number, 1000) for number in range(pin.num_chunks(1000))]
    assert torch.equal(torch.cat(chunks), expected)
    assert sha256(torch.cat(chunks).numpy().tobytes()).hexdigest() == pin.digest
    assert {len(chunk) for chunk in chunks[1:-1]} == {1000}
