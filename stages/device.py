"""Which torch device computes a stage. Everything that crosses a boundary lives on the CPU."""

from __future__ import annotations

import torch

from protocol.errors import ConfigError


def usable_device(name: str) -> torch.device:
    """Return the device if torch can compute on it; raise ConfigError with its own reason."""
    try:
        device = torch.device(name)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise RuntimeError("torch finds no CUDA device")
        torch.ones(1, device=device).add_(1).item()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        if reason.startswith("Expected one of"):  # and then all back ends that torch ever had
            reason = "torch knows no such device"
        raise ConfigError(
            f"device {name!r} cannot be used: {reason}",
            f"This computer has: {', '.join(_present())}.",
        ) from error
    return device


def free_bytes(name: str, host_bytes: int) -> int:
    """Return what is free where a stage would lie, given what is free on the host; ConfigError.

    States pass through the host on their way to the disk and to peers, so it limits them too.
    """
    device = usable_device(name)
    if device.type != "cuda":
        return host_bytes
    return min(host_bytes, torch.cuda.mem_get_info(device)[0])


def _present() -> list[str]:
    """Name the devices that torch finds on this computer."""
    num_cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    mps = ["mps"] if torch.backends.mps.is_available() else []
    return ["cpu", *(f"cuda:{index}" for index in range(num_cuda)), *mps]
