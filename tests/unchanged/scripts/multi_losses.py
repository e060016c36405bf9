"""Several losses, each with a backward of its own: a shared trunk, three heads, weights by uncertainty."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(7, 14), nn.ReLU())
        self.heads = nn.ModuleDict({"a": nn.Linear(14, 1), "b": nn.Linear(14, 3), "c": nn.Linear(14, 1)})
        self.log_vars = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        h = self.trunk(x)
        return {name: head(h) for name, head in self.heads.items()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", default="out")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(29)
    x = torch.randn(84, 7)
    ds = TensorDataset(x, x.sum(1, keepdim=True), torch.randint(0, 3, (84,)), x.prod(1, keepdim=True))
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=4, sampler=sampler)
    net = MultiTask()
    model = DDP(net, find_unused_parameters=True)
    opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    curves = {"regression": [], "classification": [], "extra": []}
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for i, (xb, ya, yb, yc) in enumerate(loader):
            opt.zero_grad()
            with model.no_sync():
                out = model(xb)
                regression = F.mse_loss(out["a"], ya)
                classification = F.cross_entropy(out["b"], yb)
                weights = torch.exp(-net.log_vars)
                (weights[0] * regression).backward(retain_graph=True)
                (weights[1] * classification + net.log_vars.sum()).backward()
            extra = F.smooth_l1_loss(model(xb)["c"], yc)
            extra.backward()
            opt.step()
            for name, value in (("regression", regression), ("classification", classification), ("extra", extra)):
                curves[name].append(value.item())
            if i % 3 == 0:
                print(f"{rank} {epoch}/{i}", {k: v[-1] for k, v in curves.items()}, net.log_vars.tolist())
    os.makedirs(args.output_dir, exist_ok=True)
    torch.save(net.state_dict(), f"{args.output_dir}/net{rank}.pt")
    torch.save(curves, f"{args.output_dir}/curves{rank}.pt")


if __name__ == "__main__":
    main()
