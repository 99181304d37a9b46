"""The peer: torch.distributed.pipelining's 1F1B over gloo on CPU, one thread a stage.

Prints the median tokens/s of stage 0's steps. Public interfaces only.
"""

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

VOCAB, DIM, HEADS, BLOCKS, LENGTH = 256, 256, 4, 8, 128
MICROBATCH, NUM_MICROBATCHES = 4, 8


class Embed(nn.Module):
    """Token and position embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, DIM), nn.Embedding(LENGTH, DIM)

    def forward(self, ids: Tensor) -> Tensor:
        positions: Tensor = self.positions(torch.arange(ids.shape[1]))
        tokens: Tensor = self.tokens(ids)
        return tokens + positions


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, DIM // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, DIM))
        changed: Tensor = self.mlp(self.norm2(x))
        return x + changed


class Head(nn.Module):
    """Final norm and projection to the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.project = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.project(self.norm(x))
        return logits


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.view(-1, VOCAB), target.reshape(-1))


def stage(rank: int, cuts: list[int], port: int, steps: int, queue: "mp.Queue[float]") -> None:
    """One pipeline stage in its own process."""
    num_stages = len(cuts) - 1
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", rank=rank, world_size=num_stages)
    layers = [Embed(), *(Block() for _ in range(BLOCKS)), Head()]
    module = nn.Sequential(*layers[cuts[rank] : cuts[rank + 1]])
    optimizer = torch.optim.AdamW(module.parameters(), 1e-3)
    place = PipelineStage(module, rank, num_stages, torch.device("cpu"))
    schedule = Schedule1F1B(place, n_microbatches=NUM_MICROBATCHES, loss_fn=loss)
    times = []
    for _ in range(steps):
        batch = torch.randint(0, VOCAB, (MICROBATCH * NUM_MICROBATCHES, LENGTH + 1))
        begin = time.perf_counter()
        if rank == 0:
            schedule.step(batch[:, :-1].contiguous())
        elif rank == num_stages - 1:
            schedule.step(target=batch[:, 1:].contiguous(), losses=[])
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - begin)
    if rank == 0:
        tokens = MICROBATCH * NUM_MICROBATCHES * LENGTH
        queue.put(tokens / statistics.median(times[2:]))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuts", default="0,5,10", help="first layer of each stage, then the end")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--port", type=int, default=29610)
    options = parser.parse_args()
    cuts = [int(cut) for cut in options.cuts.split(",")]
    context = mp.get_context("spawn")
    queue = context.Queue()
    processes = [
        context.Process(target=stage, args=(rank, cuts, options.port, options.steps, queue))
        for rank in range(len(cuts) - 1)
    ]
    for process in processes:
        process.start()
    print(queue.get(timeout=300))
    for process in processes:
        process.join(60)


if __name__ == "__main__":
    main()
