"""Checks of what is installed: Python, libraries, GMP, the compiler, the device."""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.metadata
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence

from node.doctor.finding import Finding, ok, warning, wrong
from protocol.deadlines import Deadlines

_OLDEST = (3, 11)
_INSTALL = "Install shoal again: `make install`, or `pip install shoal` in a fresh environment."
_GMP = "Debian, Ubuntu: sudo apt-get install libgmp10. Fedora: sudo dnf install gmp."
_COMPILER = (
    "Only needed to install shoal. Debian, Ubuntu: sudo apt-get install gcc libgmp-dev. "
    "Fedora: sudo dnf install gcc gmp-devel."
)


def check_python(
    version: Sequence[int] = sys.version_info[:3], platform: str = sys.platform
) -> Finding:
    """Python is new enough, and the system is one that shoal runs on."""
    text = f"Python {'.'.join(map(str, version))} on {platform}"
    if tuple(version[:2]) < _OLDEST:
        return wrong("python", text, "Install Python 3.11 or newer.")
    if platform != "linux":
        return wrong("python", text, "Use Linux: a virtual machine, WSL 2 or the container image.")
    return ok("python", text)


def check_libraries(requirements: Iterable[str] | None = None) -> Finding:
    """Every library that shoal declares is installed."""
    try:
        declared = requirements or importlib.metadata.requires("shoal") or ()
    except importlib.metadata.PackageNotFoundError:
        return wrong("libraries", "shoal itself is not installed as a package", _INSTALL)
    names = [_name_of(text) for text in declared if "extra ==" not in text]
    missing = sorted(name for name in names if not _is_installed(name))
    if missing:
        return wrong("libraries", f"missing: {', '.join(missing)}", _INSTALL)
    return ok("libraries", f"all {len(names)} are installed")


def _name_of(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    return found[0] if found else requirement


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def check_gmp(name: str = "gmp") -> Finding:
    """The GMP library, which signatures of libp2p need, can be loaded."""
    file = ctypes.util.find_library(name) or f"lib{name}.so.10"
    try:
        ctypes.CDLL(file)
    except OSError as error:
        return wrong("libgmp", f"{file} cannot be loaded: {error}", _GMP)
    return ok("libgmp", file)


def check_compiler(command: str = "gcc") -> Finding:
    """A C compiler that finds the GMP headers, for the next installation."""
    path = shutil.which(command)
    if path is None:
        return warning("compiler", f"there is no {command}", _COMPILER)
    tried = subprocess.run(
        [path, "-E", "-"],
        input=b"#include <gmp.h>\n",
        capture_output=True,
        check=False,
        timeout=Deadlines().sidecar_call_s,
    )
    if tried.returncode != 0:
        return warning("compiler", f"{path} does not find gmp.h", _COMPILER)
    return ok("compiler", f"{path}, with gmp.h")


def check_device(device: str) -> Finding:
    """The device of the settings can compute."""
    import torch

    try:
        torch.ones(1, device=device).sum().item()
    except (RuntimeError, AssertionError, ValueError) as error:
        cause = str(error).strip().splitlines()[0].rstrip(".")
        return wrong("device", f"{device}: {cause}", " ".join(_device_hints(device)))
    return ok("device", f"{device}, torch {torch.__version__}")


def _device_hints(device: str) -> Iterator[str]:
    """Tell a torch without CUDA from a missing driver and from a card that is not there."""
    import torch

    if device.startswith("cuda"):
        if torch.version.cuda is None:
            yield "This build of torch has no CUDA: install one that has."
        elif not torch.cuda.is_available():
            yield "No driver answers: check `nvidia-smi`; a container needs `--gpus all`."
        else:
            yield f"There are {torch.cuda.device_count()} devices: cuda:0 and on."
    yield "Or compute on the processor: --device cpu."
