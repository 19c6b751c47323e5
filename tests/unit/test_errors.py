"""One code per error: the tree, the metric's label and the headings of the docs are equal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from node.metrics import LABEL_VALUES, error_classes
from protocol import errors
from protocol.errors import Byzantine, ConfigError, NonFinite, PeerError, ShoalError

DOCS = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
CLASSES = error_classes()


def test_codes_are_unique_and_stable() -> None:
    assert sorted(cls.code for cls in CLASSES) == [
        "averaging_failed", "byzantine", "clock", "config", "identity", "internal", "non_finite",
        "not_allowed", "numerics", "peer", "peer_gone", "peer_timeout", "protocol_violation",
        "resource", "sidecar", "state_mismatch", "unreachable", "version_mismatch",
    ]  # fmt: skip


def test_the_tree_is_drawn_in_the_docstring() -> None:
    assert errors.__doc__ is not None
    drawn = re.findall(r"^ {4}(?:[|\\ -]*)([A-Z]\w+)", errors.__doc__, re.MULTILINE)
    assert sorted(drawn) == sorted(cls.__name__ for cls in CLASSES)


def test_every_code_has_a_heading_and_every_heading_a_code() -> None:
    headings = re.findall(r"^## `(\w+)`$", DOCS.read_text(), re.MULTILINE)
    assert sorted(headings) == sorted(cls.code for cls in CLASSES)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.code)
def test_every_section_tells_meaning_cause_remedy_and_exit_status(cls: type[ShoalError]) -> None:
    section = DOCS.read_text().split(f"## `{cls.code}`\n")[1].split("\n## ")[0]
    for word in ("**Meaning.**", "**Cause.**", "**Remedy.**"):
        assert word in section
    shown = re.search(r"Exit status (\d+)\.", section)
    if issubclass(cls, PeerError):
        assert shown is None  # it never leaves a session
    else:
        assert shown is not None
        assert int(shown[1]) == cls.exit_status


def test_the_metric_knows_exactly_these_codes() -> None:
    assert LABEL_VALUES["code"] == {cls.code for cls in CLASSES}


def test_errors_carry_cause_and_hint() -> None:
    assert ConfigError("cause").hint == ConfigError.default_hint
    assert ConfigError("cause", "hint").hint == "hint"
    assert str(ConfigError("cause")) == "cause"
    assert Byzantine("cause", "proof").evidence == "proof"
    assert "stage 2 forward" in NonFinite(2, "forward", "12D3").cause


def test_exit_statuses_tell_families_apart() -> None:
    top = [cls for cls in ShoalError.__subclasses__() if cls in CLASSES and cls is not PeerError]
    assert len({cls.exit_status for cls in top}) == len(top)
