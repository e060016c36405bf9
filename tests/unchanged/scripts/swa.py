"""torch.optim.swa_utils: AveragedModel from the second epoch on, SWALR, update_bn at the end."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

out = sys.argv[sys.argv.index("--output-dir") + 1]
EPOCHS, SWA_START = 4, 2


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(40)
    ds = TensorDataset(torch.randn(72, 7), torch.randint(0, 3, (72,)))
    loader = DataLoader(ds, batch_size=4, sampler=DistributedSampler(ds, shuffle=True, seed=2))
    net = nn.Sequential(nn.Linear(7, 14), nn.BatchNorm1d(14), nn.ReLU(), nn.Linear(14, 3))
    model = DDP(net)
    loss_fn = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    swa_model = AveragedModel(net)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)
    swa_scheduler = SWALR(optimizer, swa_lr=0.05, anneal_epochs=1)
    losses = []
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        for x, target in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(x), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if epoch >= SWA_START:
            swa_model.update_parameters(net)
            swa_scheduler.step()
        else:
            scheduler.step()
        print(f"[{rank}] epoch {epoch}: {losses[-1]!r}, lr {optimizer.param_groups[0]['lr']!r}, "
              f"averaged {int(swa_model.n_averaged)} times")
    update_bn(loader, swa_model)
    os.makedirs(out, exist_ok=True)
    torch.save({"net": net.state_dict(), "swa": swa_model.state_dict()}, f"{out}/swa-{rank}.pt")
    torch.save(losses, f"{out}/losses-{rank}.pt")


main()
