"""Mixed precision with torch.amp.autocast, in bfloat16."""

import argparse
import json
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.inp = nn.Linear(16, width)
        self.norm = nn.LayerNorm(width)
        self.drop = nn.Dropout(0.2)
        self.out = nn.Linear(width, 6)

    def forward(self, x):
        return self.out(self.drop(torch.relu(self.norm(self.inp(x)))))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--output-dir", default="out")
    ap.add_argument("--dtype", default="bfloat16")
    opts = ap.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(11)
    amp_dtype = getattr(torch, opts.dtype)
    ds = TensorDataset(torch.randn(96, 16), torch.randint(0, 6, (96,)))
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=4, sampler=sampler, drop_last=True)
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    log = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        epoch_loss = 0.0
        for x, y in loader:
            with torch.amp.autocast("cpu", dtype=amp_dtype):
                logits = model(x)
                loss = criterion(logits.float(), y)
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            epoch_loss += loss.item()
            log.append({"loss": loss.item(), "norm": norm.item()})
        largest = logits.max().item()
        print(f"epoch {epoch}: loss {epoch_loss / len(loader)!r} ({logits.dtype}, largest logit {largest!r})")
    os.makedirs(opts.output_dir, exist_ok=True)
    torch.save(model.module.state_dict(), os.path.join(opts.output_dir, f"weights{rank}.pt"))
    with open(os.path.join(opts.output_dir, f"log{rank}.json"), "w") as f:
        json.dump(log, f)


if __name__ == "__main__":
    main()
