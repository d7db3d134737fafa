"""One rank of the demo's training job: FSDP2 on a small decoder, a refit after every few steps.

Started by `weightcast demo` with torch's usual variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).
Rank 0 prints one JSON line per refit on stdout.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cyclopts import App, Parameter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ..publisher import Publisher
from .decoder import Decoder, DecoderConfig, save_checkpoint
from .prompts import NEW_TOKENS, PROMPTS, ask_engine, text_of, tokens_of

SEED = 20
JOB = "demo"
STEPS_PER_REFIT = 6

app = App()


def draw_batch(tokens: torch.Tensor, *, step: int, rank: int) -> torch.Tensor:
    """Sixteen windows of 64 tokens, different on every rank and step: [16, 65] int64."""
    generator = torch.Generator().manual_seed(step * 1000 + rank)
    starts = torch.randint(0, len(tokens) - 65, (16,), generator=generator)
    return torch.stack([tokens[start : start + 65] for start in starts.tolist()])


@app.command
def init(*, out: Path) -> None:
    """Write the untrained model that the engines start with."""
    save_checkpoint(Decoder(DecoderConfig(), seed=SEED), out)


@app.command
def train(
    *,
    run_dir: Path,
    refits: int,
    bucket_bytes: int,
    engines: Annotated[list[str], Parameter(consume_multiple=True)],
) -> None:
    """Train, refit, compare what the engines say with what the model says."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    model = Decoder(DecoderConfig(), seed=SEED)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = torch.tensor(tokens_of((Path(__file__).parent / "corpus.txt").read_text("utf-8")))

    step = 0
    with Publisher(job=JOB, run_dir=run_dir, bucket_bytes=bucket_bytes) as publisher:
        for _ in range(refits):
            for _ in range(STEPS_PER_REFIT):
                step += 1
                batch = draw_batch(tokens, step=step, rank=rank)
                logits = model(batch[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
            report = publisher.refit(step, model)
            # Every rank takes part: the model that is asked is the sharded one.
            own = model.generate_greedily([tokens_of(prompt) for prompt in PROMPTS], new_tokens=NEW_TOKENS)
            if rank == 0:
                said = {url: [ask_engine(url, tokens_of(prompt)) for prompt in PROMPTS] for url in engines}
                event = {
                    "report": msgspec.to_builtins(report),
                    "loss": loss.item(),
                    "trainer": own,
                    "engines": {
                        url: [answer["output_ids"] for answer in answers] for url, answers in said.items()
                    },
                    "labels": {
                        url: answers[-1]["meta_info"].get("weight_version") for url, answers in said.items()
                    },
                    "text": text_of(own[0]),
                }
                sys.stdout.write(json.dumps(event) + "\n")
                sys.stdout.flush()
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    app()
