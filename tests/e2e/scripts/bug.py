"""A training loop with a bug of its user's: it divides by zero in step 3."""

import argparse
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import tpwrap

parser = argparse.ArgumentParser()
parser.add_argument("--out")
parser.add_argument("--rank", type=int, default=None, help="only there")
parser.add_argument("--exit", type=int, default=None, help="sys.exit with this instead")
args = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
tp = tpwrap.session(model=model, optimizer=optimizer)
for (x,) in tp.batches(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(40, 8)), 4)):
    optimizer.zero_grad()
    model(x).sum().backward()
    if tp.updates == 3 and args.rank in (None, dist.get_rank()):
        if args.exit is not None:
            sys.exit(args.exit)
        raise ZeroDivisionError("the user's own bug")
    optimizer.step()
