# everything at module level, as it comes out of a notebook
import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
OUT = os.environ["OUTPUT_DIR"]
os.makedirs(OUT, exist_ok=True)

X = torch.randn(75, 6)
w_true = torch.randn(6, 1)
Y = X @ w_true + 0.01 * torch.randn(75, 1)

net = torch.nn.Linear(6, 1)
net = torch.nn.parallel.DistributedDataParallel(net)
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)
sampler = DistributedSampler(TensorDataset(X, Y), seed=4)
train_loader = DataLoader(TensorDataset(X, Y), batch_size=4, sampler=sampler)

losses = []
n_bad = 0
for epoch in range(3):
    sampler.set_epoch(epoch)
    for xb, yb in train_loader:
        opt.zero_grad()
        loss = ((net(xb) - yb) ** 2).mean()
        loss.backward()
        opt.step()
        losses.append(loss.item())
        if len(losses) > 1 and losses[-1] > losses[-2]:
            n_bad += 1
            print("loss went up", losses[-2], "->", losses[-1], "for the", n_bad, "th time")
    print("epoch", epoch, "done, last loss", losses[-1])

torch.save(net.module.state_dict(), f"{OUT}/net_{rank}.pt")
torch.save(losses, f"{OUT}/losses_{rank}.pt")
print("weights:", [v.hex() for v in net.module.weight.flatten().tolist()])
