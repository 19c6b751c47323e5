"""Text, export and import with real daemons, while training goes on and holders are killed."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest
import torch
from harness import LawSwarm, Plan
from safetensors.torch import load_file

from node.export_folder import export_model
from node.local_swarm import Daemon
from protocol.keys import PeerId
from protocol.manifest import Manifest

# `shoal generate` on a real swarm is in test_docs_run, too, which make test runs.
pytestmark = pytest.mark.slow
PROMPT = "import "
NUM_TOKENS = 40
LIMIT_S = 120.0
SHOAL = "from cli.main import main; main()"


class LongPlan(Plan):
    """A training that outlasts the test."""

    def manifest(self, data_nodes: Sequence[PeerId]) -> Manifest:
        plain = super().manifest(data_nodes)
        training = plain.training.model_copy(update={"steps": 10_000, "quota": 4})
        return plain.model_copy(update={"training": training})


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LawSwarm]:
    plan = LongPlan(stages=2, holders=2, data_nodes=1)
    with LawSwarm(tmp_path_factory.mktemp("generate"), plan) as swarm:
        swarm.environment |= {"SHOAL_SNAPSHOT_STEPS": "1", "SHOAL_SNAPSHOTS_KEPT": "1000"}
        swarm.start()
        swarm.wait_until(lambda: step_of(swarm) >= 3, "the first steps")
        yield swarm
    assert not swarm.leftovers()


def step_of(swarm: LawSwarm) -> int:
    status = swarm.organiser.status()
    return status.step if status else 0


def weights_at(swarm: LawSwarm, step: int) -> dict[str, torch.Tensor]:
    """What the snapshots of a step hold, of all stages."""
    found: dict[str, torch.Tensor] = {}
    for path in swarm.root.glob(f"*/snapshots/stage-*-step-{step}-*.safetensors"):
        found |= load_file(path)
    return {name: weight for name, weight in found.items() if not name.startswith("moment")}


def greedy(swarm: LawSwarm, folder: Path, step: int, num_tokens: int) -> str:
    """What transformers writes with the weights of a step, through the exported folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    weights = weights_at(swarm, step)
    strange = model.load_state_dict(weights, strict=False)
    assert not strange.unexpected_keys
    assert all("norm" in name for name in strange.missing_keys)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    given = tokenizer(PROMPT, return_tensors="pt")
    out = model.generate(**given, max_new_tokens=num_tokens, do_sample=False)
    return tokenizer.decode(out[0][given["input_ids"].shape[1] :], skip_special_tokens=True)


def pins(daemon: Daemon) -> float:
    """How many pins a daemon keeps, as its metrics tell."""
    log = (daemon.state_dir / "log.jsonl").read_text()
    url = re.findall(r'"(http://127\.0\.0\.1:\d+/metrics)"', log)[-1]
    text = httpx.get(url, timeout=10).text
    found = re.search(r"^shoal_pins (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def no_pins(swarm: LawSwarm) -> bool:
    return all(pins(daemon) == 0 for daemon in swarm.daemons if daemon.is_running)


def test_an_export_is_the_model_of_one_step(swarm: LawSwarm, tmp_path: Path) -> None:
    done = export_model(swarm.organiser.client, tmp_path / "hf", lambda *_: None)
    found: dict[str, torch.Tensor] = {}
    for path in (tmp_path / "hf").glob("*.safetensors"):
        found |= load_file(path)
    swarm.wait_until(lambda: step_of(swarm) > done.step, "the next step")
    weights = weights_at(swarm, done.step)
    assert len(weights) == 2 + 6 * 7
    for name, weight in weights.items():
        assert torch.equal(found[name], weight)
    swarm.wait_until(lambda: no_pins(swarm), "the pins to be freed", LIMIT_S)


def test_text_is_the_greedy_text_of_its_step_though_a_holder_dies(
    swarm: LawSwarm, tmp_path: Path
) -> None:
    export_model(swarm.organiser.client, tmp_path / "hf", lambda *_: None)
    text, step = "", None
    for event in swarm.organiser.client.generate(PROMPT, NUM_TOKENS):
        step = event.step if event.step is not None else step
        text += event.text
        if event.num_tokens == NUM_TOKENS // 2 and event.step is None:
            swarm.kill("stage-1-a")
            now = step_of(swarm)
            # The weights that are used are old ones by now.
            swarm.wait_until(lambda now=now: step_of(swarm) >= now + 3, "later steps", LIMIT_S)
    assert step is not None
    assert step_of(swarm) > step + 2
    assert text == greedy(swarm, tmp_path / "hf", step, NUM_TOKENS)
    swarm.wait_until(lambda: no_pins(swarm), "the pins to be freed", LIMIT_S)


def test_an_interrupt_frees_what_the_holders_keep(swarm: LawSwarm) -> None:
    state = str(swarm.organiser.state_dir)
    writer = subprocess.Popen(
        [sys.executable, "-c", SHOAL, "generate", PROMPT, "--max-tokens", "4096", "--state", state],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    swarm.wait_until(lambda: not no_pins(swarm), "a text to begin", LIMIT_S)
    writer.send_signal(2)
    _, told = writer.communicate(timeout=LIMIT_S)
    assert writer.returncode == 130
    assert "interrupted" in told
    swarm.wait_until(lambda: no_pins(swarm), "the pins to be freed", LIMIT_S)
