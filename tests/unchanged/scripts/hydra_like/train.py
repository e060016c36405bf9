import os
from pathlib import Path

import hydralike
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Experiment:
    def __init__(self, cfg):
        self.cfg = cfg
        self.rank = int(os.environ["RANK"])
        self.model = DistributedDataParallel(hydralike.instantiate("torch.nn.Linear", cfg.features, 2))
        self.optimizer = hydralike.instantiate(cfg.optimizer, self.model.parameters(), lr=cfg.lr)
        self.callbacks = [self.print_loss, self.keep_loss]
        self.losses = []

    def print_loss(self, epoch, step, loss):
        if step % self.cfg.log_every == 0:
            print(f"[{self.rank}] {epoch}/{step} {loss!r}")

    def keep_loss(self, epoch, step, loss):
        self.losses.append(loss)

    def fit(self, loader):
        step = 0
        for epoch in range(self.cfg.epochs):
            loader.sampler.set_epoch(epoch)
            for x, y in loader:
                loss = torch.nn.functional.cross_entropy(self.model(x), y)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                for callback in self.callbacks:
                    callback(epoch, step, loss.item())
                step += 1


@hydralike.main(epochs=3, lr=0.05, features=9, optimizer="torch.optim.Adagrad", log_every=2, output_dir="out", seed=1)
def main(cfg):
    dist.init_process_group("gloo")
    torch.manual_seed(cfg.seed)
    Path(cfg.output_dir).mkdir(parents=True, exist_ok=True)
    data = TensorDataset(torch.randn(84, cfg.features), torch.randint(0, 2, (84,)))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    experiment = Experiment(cfg)
    experiment.fit(loader)
    torch.save(experiment.model.module.state_dict(), Path(cfg.output_dir, f"model.{experiment.rank}.pt"))
    Path(cfg.output_dir, f"losses.{experiment.rank}").write_text("\n".join(map(float.hex, experiment.losses)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
