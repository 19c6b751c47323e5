"""Which torch device computes a stage. Everything that crosses a boundary lives on the CPU."""

from __future__ import annotations

import torch

from protocol.errors import ConfigError

_HINT = "Name a device that torch sees on this computer, such as cpu, cuda:0 or mps."


def usable_device(name: str) -> torch.device:
    """Return the device if torch can compute on it; raise ConfigError with its own reason."""
    try:
        device = torch.device(name)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise RuntimeError("torch finds no CUDA device")
        torch.ones(1, device=device).add_(1).item()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device {name!r} cannot be used: {reason}", _HINT) from error
    return device
