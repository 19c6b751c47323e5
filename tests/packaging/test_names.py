"""Our import packages have short names: nobody else may install them."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from source_tree import PACKAGES, ROOT

SOURCES_OF_THE_WHEEL = ("pyproject.toml", "README.md", "LICENSE", *PACKAGES)


def _top_level_names(distribution: importlib.metadata.Distribution) -> set[str]:
    """The names that installing a distribution makes importable, by its list of files."""
    files = distribution.files or []
    return {file.parts[0].removesuffix(".py") for file in files if file.suffix in (".py", ".so")}


def test_no_dependency_installs_our_names() -> None:
    others = [d for d in importlib.metadata.distributions() if d.metadata["Name"] != "shoal"]
    clashes = {d.metadata["Name"]: _top_level_names(d) & set(PACKAGES) for d in others}
    assert {name: names for name, names in clashes.items() if names} == {}


def test_the_check_for_names_sees_a_known_package() -> None:
    assert "pytest" in _top_level_names(importlib.metadata.distribution("pytest"))


def test_installed_versions_agree() -> None:
    """No dependency asks for a version that another one rules out."""
    command = [sys.executable, "-m", "pip", "check"]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_dependency_is_pinned() -> None:
    """constraints.txt names each installed distribution once, so an install is repeatable."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [_normal(line.split("==")[0]) for line in lines if line and not line.startswith("#")]
    assert len(pins) == len(set(pins))
    ours = importlib.metadata.distribution("shoal").requires or []
    names = {_normal(requirement) for requirement in ours}
    assert names - set(pins) == set()


def _normal(requirement: str) -> str:
    """The normalised name at the start of a requirement."""
    return canonicalize_name(Requirement(requirement).name)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel built from a copy of the sources, so that the tree stays clean."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES_OF_THE_WHEEL:
        if (ROOT / name).is_dir():
            skip = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / "source" / name, ignore=skip)
        else:
            (folder / "source").mkdir(exist_ok=True)
            shutil.copy(ROOT / name, folder / "source" / name)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "-q", "-w", str(folder)]
    command = [sys.executable, "-m", "pip", "wheel", *options, str(folder / "source")]
    subprocess.run(command, check=True, capture_output=True, timeout=240)
    return zipfile.ZipFile(next(folder.glob("shoal-*.whl")))


def test_wheel_holds_exactly_our_packages(wheel: zipfile.ZipFile) -> None:
    names = [Path(name) for name in wheel.namelist()]
    tops = {path.parts[0] for path in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)
    packed = {path.as_posix() for path in names if path.parts[0] in PACKAGES}
    sources = {p.relative_to(ROOT).as_posix() for k in PACKAGES for p in (ROOT / k).rglob("*.py")}
    assert packed == sources


def test_wheel_depends_on_released_versions_only(wheel: zipfile.ZipFile) -> None:
    """No dependency by address: what is not released cannot be installed a year later."""
    name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    metadata = message_from_bytes(wheel.read(name))
    requirements = metadata.get_all("Requires-Dist") or []
    assert requirements
    assert [r for r in requirements if "@" in r or "://" in r] == []
    assert metadata["License-Expression"] == "Apache-2.0"


def test_wheel_installs_the_command(wheel: zipfile.ZipFile) -> None:
    name = next(n for n in wheel.namelist() if n.endswith(".dist-info/entry_points.txt"))
    assert "shoal = cli.main:main" in wheel.read(name).decode()
