"""The places for microbatches under way, while the flows change."""

from __future__ import annotations

import trio

from protocol.core.signal import Signal
from protocol.core.window import Window


async def take(window: Window, num: int, taken: list[int]) -> None:
    for number in range(num):
        await window.acquire()
        taken.append(number)


async def test_a_wider_window_is_used_at_once_and_a_narrower_one_waits(autojump_clock) -> None:
    limit, changed, taken = [2], Signal(), list[int]()
    window = Window(lambda: limit[0], changed)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(take, window, 6, taken)
        await trio.testing.wait_all_tasks_blocked()
        assert len(taken) == 2
        limit[0] = 4
        changed.notify()
        await trio.testing.wait_all_tasks_blocked()
        assert len(taken) == 4
        limit[0] = 3
        window.release()
        await trio.testing.wait_all_tasks_blocked()
        assert len(taken) == 4
        window.release()
        await trio.testing.wait_all_tasks_blocked()
        assert len(taken) == 5
        limit[0] = 9
        changed.notify()
    assert window.num_open == 4
