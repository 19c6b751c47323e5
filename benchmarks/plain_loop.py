"""The best plain loop that torch gives: the whole model in one process, no swarm around it.

The model is the code of ``stages.model``, so that what is compared is the swarm and not two ways
to write a block; the optimiser is torch's fused AdamW. Prints ``ready`` after a warm-up step,
waits for a line on stdin, and prints the measured tokens/s.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from cli.recipe import Recipe
from protocol.keys import NodeKey
from protocol.manifest import Manifest
from stages.initialisation import fill_initial
from stages.layout import stage_layout
from stages.model import head_loss, rotary_table, run_blocks


def manifest_of(width: int) -> Manifest:
    """The demo's model of that width, as one stage."""
    return Recipe(width=width, stages=1).manifest([NodeKey(bytes(32)).peer_id])


def parameters_of(manifest: Manifest, stage: int) -> list[torch.Tensor]:
    """The matrices of a stage, as leaves for autograd."""
    layout = stage_layout(manifest, stage)
    flat = torch.empty(layout.num_elements)
    fill_initial(flat, layout, manifest.training.seed, manifest.model.layers)
    return [view.clone().requires_grad_() for view in layout.leaf_views(flat)]


def training_step(manifest: Manifest) -> Callable[[], None]:
    """Return a function that makes one optimiser step over the whole quota."""
    model, training = manifest.model, manifest.training
    blocks, (embedding, head) = parameters_of(manifest, 1), parameters_of(manifest, 0)
    everything = [*blocks, embedding, head]
    optimizer = torch.optim.AdamW(everything, lr=1e-3, betas=(0.9, 0.95), fused=True)
    table = rotary_table(model)
    window_BU = torch.randint(model.vocabulary, (training.microbatch, model.context + 1))

    def step() -> None:
        for _ in range(training.quota):
            h_BTW = F.embedding(window_BU[:, :-1], embedding)
            h_BTW = run_blocks(h_BTW, blocks, model, table)
            loss = head_loss(h_BTW, head, window_BU[:, 1:], model)
            (loss / training.quota).backward()
        torch.nn.utils.clip_grad_norm_(everything, training.clip_norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    """Measure in this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    manifest = manifest_of(options.width)
    step = training_step(manifest)
    step()
    print("ready", flush=True)
    sys.stdin.readline()
    started = time.perf_counter()
    for _ in range(options.steps):
        step()
    seconds = time.perf_counter() - started
    training = manifest.training
    tokens = options.steps * training.quota * training.microbatch * manifest.model.context
    print(tokens / seconds)


if __name__ == "__main__":
    main()
