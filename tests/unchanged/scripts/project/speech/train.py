import argparse
import logging
import os

import torch
import torch.distributed as dist

from .data import make_loader
from .model import Classifier

logger = logging.getLogger(__name__)


def train_epoch(model, loader, optimizer, epoch):
    model.train()
    losses = []
    n_frames = 0
    for frames, lengths, labels in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(frames, lengths), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        n_frames += int(lengths.sum())
    logger.info("epoch %d: %d frames, loss %r", epoch, n_frames, sum(losses) / len(losses))
    return losses


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", default="exp")
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO, format=f"%(levelname)s {rank} %(name)s: %(message)s")
    torch.manual_seed(3)
    loader = make_loader(78, 4)
    model = torch.nn.parallel.DistributedDataParallel(Classifier())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    history = []
    for epoch in range(args.epochs):
        loader.sampler.set_epoch(epoch)
        history += train_epoch(model, loader, optimizer, epoch)
    os.makedirs(args.output_dir, exist_ok=True)
    torch.save({"model": model.module.state_dict(), "history": history}, f"{args.output_dir}/exp.{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
