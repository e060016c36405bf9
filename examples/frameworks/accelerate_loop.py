"""Train a small convolutional network on scikit-learn's handwritten digits with Accelerate.

torchrun --standalone --nproc-per-node 3 examples/frameworks/accelerate_loop.py --output-dir runs/accelerate
tpwrap --nodes 3 --spares 1 python examples/frameworks/accelerate_loop.py --output-dir runs/accelerate
"""

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU()
        )
        self.classifier = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(144, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.classifier(self.features(images))
        return logits


def loaders(batch_size: int) -> tuple[DataLoader[tuple[torch.Tensor, ...]], DataLoader[tuple[torch.Tensor, ...]]]:
    images, labels = load_digits(return_X_y=True)
    inputs, targets = torch.from_numpy(images / 16).float().view(-1, 1, 8, 8), torch.from_numpy(labels).long()
    train, test = TensorDataset(inputs[:500], targets[:500]), TensorDataset(inputs[1500:], targets[1500:])
    return DataLoader(train, batch_size, shuffle=True), DataLoader(test, 32)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small convolutional network with Accelerate.")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/accelerate"))
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--accumulate", type=int, default=2)
    args = parser.parse_args()

    set_seed(3)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=args.accumulate,
        project_config=ProjectConfiguration(
            project_dir=str(args.output_dir), automatic_checkpoint_naming=True, total_limit=2
        ),
    )
    train_loader, test_loader = loaders(batch_size=16)
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, epochs=args.epochs, steps_per_epoch=32)
    model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, test_loader, scheduler
    )

    history = []
    done = 0
    for epoch in range(args.epochs):
        model.train()
        total_loss = torch.zeros(())
        for inputs, targets in train_loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(inputs), targets)
                total_loss += loss.detach()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                done += 1
                if done % 2 == 0:
                    accelerator.print(f"step {done}: loss {loss.item():.6f}, lr {scheduler.get_last_lr()[0]:.6f}")

        model.eval()
        correct = seen = 0
        for inputs, targets in test_loader:
            with torch.no_grad():
                predictions = model(inputs).argmax(-1)
            predictions, targets = accelerator.gather_for_metrics((predictions, targets))
            correct += int((predictions == targets).sum())
            seen += len(targets)
        mean_loss = accelerator.reduce(total_loss, "mean").item() / len(train_loader)
        history.append({"epoch": epoch, "step": done, "loss": mean_loss, "accuracy": correct / seen})
        accelerator.print(f"epoch {epoch}: loss {mean_loss:.6f}, accuracy {correct / seen:.4f} of {seen}")
        accelerator.save_state()

    accelerator.wait_for_everyone()
    accelerator.save_model(model, args.output_dir / "final")
    if accelerator.is_main_process:
        (args.output_dir / "history.json").write_text(json.dumps(history, indent=2) + "\n")
    accelerator.end_training()


if __name__ == "__main__":
    main()
