"""Train a small convolutional network on scikit-learn's handwritten digits with Lightning.

torchrun --standalone --nproc-per-node 3 examples/frameworks/lightning_module.py --nodes 1 --devices 3
tpwrap --nodes 3 --spares 1 python examples/frameworks/lightning_module.py --nodes 3 --devices 1
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

try:
    import lightning as L
    from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger
except ImportError:  # the package of the same code under its older name
    import pytorch_lightning as L
    from pytorch_lightning.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
    from pytorch_lightning.loggers import CSVLogger


class Digits(L.LightningModule):
    def __init__(self, width: int = 8, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.network = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(2 * width * 9, 10),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.network(images)
        return logits

    def training_step(self, batch: list[torch.Tensor], batch_index: int) -> torch.Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_index: int) -> None:
        images, labels = batch
        logits = self(images)
        self.log("val_loss", F.cross_entropy(logits, labels), prog_bar=True, sync_dist=True)
        self.log("val_accuracy", (logits.argmax(-1) == labels).float().mean(), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        total = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class DigitsData(L.LightningDataModule):
    def __init__(self, batch_size: int = 16, workers: int = 0) -> None:
        super().__init__()
        self.batch_size, self.workers = batch_size, workers

    def setup(self, stage: str) -> None:
        images, labels = load_digits(return_X_y=True)
        inputs, targets = torch.from_numpy(images / 16).float().view(-1, 1, 8, 8), torch.from_numpy(labels).long()
        self.train, self.validation = (
            TensorDataset(inputs[:500], targets[:500]),
            TensorDataset(inputs[1500:], targets[1500:]),
        )

    def train_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        return DataLoader(self.train, self.batch_size, shuffle=True, num_workers=self.workers)

    def val_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        return DataLoader(self.validation, 32, num_workers=self.workers)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small convolutional network with Lightning.")
    parser.add_argument("--output-dir", default="runs/lightning")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--devices", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--workers", type=int, default=0)
    args = parser.parse_args()

    L.seed_everything(5)
    trainer = L.Trainer(
        accelerator="cpu",
        strategy="ddp",
        num_nodes=args.nodes,
        devices=args.devices,
        max_epochs=args.epochs,
        accumulate_grad_batches=args.accumulate,
        gradient_clip_val=1.0,
        val_check_interval=0.5,
        log_every_n_steps=1,
        default_root_dir=args.output_dir,
        logger=CSVLogger(args.output_dir, name="log", version="0"),
        callbacks=[
            ModelCheckpoint(args.output_dir, "best-{step}", monitor="val_loss", save_top_k=1, save_last=True),
            EarlyStopping("val_loss", patience=3),
            LearningRateMonitor("step"),
        ],
        enable_progress_bar=True,
    )
    trainer.fit(Digits(), datamodule=DigitsData(workers=args.workers))
    trainer.validate(ckpt_path="best", datamodule=DigitsData(workers=args.workers))


if __name__ == "__main__":
    main()
