"""Train a byte-level GPT on the source text of Python's own standard library.

torchrun --standalone --nproc-per-node 4 examples/gpt.py --out runs/gpt
tpwrap --nodes 4 --spares 1 python examples/gpt.py --out runs/gpt
"""

import argparse
import contextlib
import hashlib
import json
import os
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import tpwrap

CORPUS_BYTES = 1_000_000


def read_corpus() -> bytes:
    """The first megabyte of the standard library's modules, in the order of their names."""
    text = b""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py")):
        text += path.read_bytes()
        if len(text) >= CORPUS_BYTES:
            break
    return text[:CORPUS_BYTES]


class Windows(Dataset[tuple[int, torch.Tensor, torch.Tensor]]):
    """`count` windows of the text, each with its successor bytes as targets; each item carries its index."""

    def __init__(self, text: bytes, context: int, count: int) -> None:
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context, self.count = context, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        # Windows that run past the end of the text start over, at offsets not used before.
        start = index * self.context % (len(self.bytes) - self.context)
        window = self.bytes[start : start + self.context + 1].long()
        return index, window[:-1], window[1:]


class GPT(nn.Module):
    """A decoder-only transformer over bytes, input and output embedding shared."""

    def __init__(self, layers: int, width: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        nn.init.normal_(self.bytes.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        hidden = self.dropout(self.bytes(tokens) + self.positions.weight[:length])
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        return F.linear(self.blocks(hidden, mask, is_causal=True), self.bytes.weight)


def digest(value: Any) -> str:
    """SHA-256 over a state dict, every tensor byte for byte."""
    if isinstance(value, torch.Tensor):
        return hashlib.sha256(value.detach().contiguous().numpy().tobytes()).hexdigest()
    if isinstance(value, dict):
        value = sorted((str(key), digest(item)) for key, item in value.items())
    return hashlib.sha256(repr(value).encode()).hexdigest()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level GPT on Python's standard library.")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--accumulation", type=int, default=2, help="micro-batches a step")
    parser.add_argument("--batch-size", type=int, default=2, help="windows a rank and micro-batch")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=64, help="bytes in a window")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate at the start")
    parser.add_argument("--workers", type=int, default=0, help="data loader processes")
    parser.add_argument("--out", type=Path, default=Path("runs/gpt"))
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed + rank)

    corpus = read_corpus()
    if rank == 0:
        print(f"corpus: {len(corpus)} bytes, sha256 {hashlib.sha256(corpus).hexdigest()}", flush=True)
    windows = Windows(corpus, args.context, args.steps * args.accumulation * args.batch_size * world)
    sampler: DistributedSampler[Any] = DistributedSampler(windows, seed=args.seed, drop_last=True)
    loader = DataLoader(windows, args.batch_size, sampler=sampler, num_workers=args.workers, drop_last=True)

    model = DistributedDataParallel(GPT(args.layers, args.width, args.heads, args.context, args.dropout))
    matrices = [weight for weight in model.parameters() if weight.dim() >= 2]
    vectors = [weight for weight in model.parameters() if weight.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    objects = (id(model), id(optimizer), id(dist.group.WORLD))

    args.out.mkdir(parents=True, exist_ok=True)
    log = os.open(args.out / f"rank{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    # TorchPass: open a session when model and optimizer are made, and loop through it. A process that
    # replaces a lost rank enters the loop where that rank was.
    tp = tpwrap.session(model=model, optimizer=optimizer, scheduler=scheduler)

    samples: list[torch.Tensor] = []
    losses: list[torch.Tensor] = []
    for indices, inputs, targets in tp.batches(loader):
        last = (tp.batch_index + 1) % args.accumulation == 0  # the micro-batch that completes a step
        with contextlib.nullcontext() if last else model.no_sync():
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()) / args.accumulation
            loss.backward()
        samples.append(indices)
        losses.append(loss.detach())
        if not last:
            continue

        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean_loss = torch.stack(losses).sum()
        used, lr = digest(torch.cat(samples)), float(optimizer.param_groups[0]["lr"])
        line = {"step": tp.updates, "loss": float(mean_loss.item()).hex(), "samples": used, "lr": lr.hex()}
        os.write(log, (json.dumps(line) + "\n").encode())  # one write: no line is ever cut in two
        samples, losses = [], []
        scheduler.step()
        if tp.updates % 10 == 0:
            dist.all_reduce(mean_loss)
            if rank == 0:
                print(f"step {tp.updates}: loss {mean_loss.item() / world:.4f}", flush=True)

    weights = digest(model.module.state_dict())
    same = objects == (id(model), id(optimizer), id(dist.group.WORLD))
    final: dict[str, Any] = {"weights": weights, "optimizer": digest(optimizer.state_dict()["state"])}
    final |= {"pid": os.getpid(), "objects": "ok" if same else "replaced"}
    (args.out / f"final{rank}.tmp").write_text(json.dumps(final) + "\n")
    os.replace(args.out / f"final{rank}.tmp", args.out / f"final{rank}.json")
    if rank == 0:
        print(f"done: {tp.updates} steps, weights {weights[:16]}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
