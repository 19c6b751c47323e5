"""The owner's choice of a torch device."""

from __future__ import annotations

import pytest
import torch

from protocol.errors import ConfigError
from stages.device import free_bytes, usable_device


def test_the_cpu_is_always_usable() -> None:
    assert usable_device("cpu").type == "cpu"


@pytest.mark.parametrize("name", ["toaster", "tpu", "cuda:77", "meta", ""])
def test_a_device_that_cannot_compute_is_refused_with_a_remedy(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        usable_device(name)
    assert repr(name) in caught.value.cause
    assert len(caught.value.cause) < 120  # torch lists every back end that it ever had
    assert caught.value.hint.startswith("This computer has: cpu")


def test_what_others_took_of_the_card_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.device.usable_device", torch.device)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5, 80))
    assert free_bytes("cuda:1", 1000) == 5
    assert free_bytes("cuda", 3) == 3
    assert free_bytes("cpu", 1000) == 1000
