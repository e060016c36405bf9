"""A Trainer class as in PyTorch's DDP tutorial series."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class MyTrainDataset(Dataset):
    def __init__(self, size):
        self.size = size
        torch.manual_seed(99)
        self.data = [(torch.rand(20), torch.rand(1)) for _ in range(size)]

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return self.data[index]


class Trainer:
    def __init__(self, model, train_data, optimizer, scheduler, save_every, output_dir):
        self.rank = int(os.environ["RANK"])
        self.model = DDP(model)
        self.train_data = train_data
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.save_every = save_every
        self.output_dir = output_dir
        self.epochs_run = 0
        self.batches_run = 0
        self.best_loss = float("inf")
        self.loss_history = []

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        output = self.model(source)
        loss = F.mse_loss(output, targets)
        loss.backward()
        self.optimizer.step()
        self.batches_run += 1
        value = loss.item()
        self.loss_history.append(value)
        self.best_loss = min(self.best_loss, value)
        return value

    def _run_epoch(self, epoch):
        b_sz = len(next(iter(self.train_data))[0])
        print(f"[RANK{self.rank}] Epoch {epoch} | Batchsize: {b_sz} | Steps: {len(self.train_data)}")
        self.train_data.sampler.set_epoch(epoch)
        total = 0.0
        for source, targets in self.train_data:
            total += self._run_batch(source, targets)
        self.scheduler.step()
        print(
            f"[RANK{self.rank}] Epoch {epoch} | total {total!r} | best {self.best_loss!r} | "
            f"lr {self.scheduler.get_last_lr()[0]!r} | batches {self.batches_run}"
        )

    def _save_snapshot(self, epoch):
        snapshot = {"MODEL_STATE": self.model.module.state_dict(), "EPOCHS_RUN": epoch, "BEST": self.best_loss}
        path = os.path.join(self.output_dir, f"snapshot_{epoch}.pt")
        torch.save(snapshot, path)
        print(f"Epoch {epoch} | Training snapshot saved at {path}")

    def train(self, max_epochs):
        for epoch in range(self.epochs_run, max_epochs):
            self._run_epoch(epoch)
            self.epochs_run = epoch + 1
            if self.rank == 0 and epoch % self.save_every == 0:
                self._save_snapshot(epoch)


def load_train_objs():
    train_set = MyTrainDataset(90)
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(20, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    return train_set, model, optimizer, scheduler


def prepare_dataloader(dataset, batch_size):
    return DataLoader(
        dataset, batch_size=batch_size, pin_memory=False, shuffle=False, sampler=DistributedSampler(dataset)
    )


def main(save_every, total_epochs, batch_size, output_dir):
    dist.init_process_group(backend="gloo")
    os.makedirs(output_dir, exist_ok=True)
    dataset, model, optimizer, scheduler = load_train_objs()
    trainer = Trainer(model, prepare_dataloader(dataset, batch_size), optimizer, scheduler, save_every, output_dir)
    trainer.train(total_epochs)
    torch.save(trainer.model.module.state_dict(), f"{output_dir}/final_{trainer.rank}.pt")
    torch.save(trainer.loss_history, f"{output_dir}/history_{trainer.rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(save_every=2, total_epochs=4, batch_size=5, output_dir=sys.argv[1])
