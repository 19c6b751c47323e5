"""What every test gets: one torch thread, repeatable hypothesis, and a check for leaks."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import hypothesis
import leaks
import pytest
import torch

SESSION_MARK = "TEST_SESSION_OF_SHOAL"
# In these folders a test owns all that it opens; real swarms are checked for processes alone.
STRICT_FOLDERS = ("tests/unit/", "tests/processes/", "tests/simulation/", "tests/endurance/")

hypothesis.settings.register_profile("dev", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_configure() -> None:
    """Mark all that this session starts, so that an orphan can be told from a stranger."""
    torch.set_num_threads(1)
    os.environ[SESSION_MARK] = uuid.uuid4().hex


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves processes, threads or open files behind."""
    mark = f"{SESSION_MARK}={os.environ[SESSION_MARK]}"
    is_strict = request.node.nodeid.startswith(STRICT_FOLDERS)
    processes = leaks.our_processes(mark)
    threads, files = (leaks.threads(), leaks.open_files()) if is_strict else (set(), set())
    yield
    found = leaks.end_new_processes(processes, mark)
    if is_strict:
        found += leaks.new_threads(threads) + leaks.new_files(files)
    if found:
        pytest.fail("the test left behind: " + "; ".join(found))
