"""Train a small GPT-2, from scratch, on the text of Python's standard library with Hugging Face's Trainer.

torchrun --standalone --nproc-per-node 3 examples/frameworks/hf_trainer.py --output_dir runs/hf
tpwrap --nodes 3 --spares 1 python examples/frameworks/hf_trainer.py --output_dir runs/hf
"""

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import EvalPrediction, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Text(Dataset[dict[str, torch.Tensor]]):
    """Windows of bytes; the model predicts each window's next byte."""

    def __init__(self, text: bytes, window: int) -> None:
        self.tokens, self.window = torch.frombuffer(bytearray(text), dtype=torch.uint8), window

    def __len__(self) -> int:
        return len(self.tokens) // self.window

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.tokens[index * self.window : (index + 1) * self.window].long()
        return {"input_ids": tokens, "labels": tokens}


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    predicted, labels = np.asarray(prediction.predictions)[:, :-1], np.asarray(prediction.label_ids)[:, 1:]
    return {"accuracy": float((predicted == labels).mean())}


def most_likely(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT-2 with Hugging Face's Trainer.")
    parser.add_argument("--output_dir", default="runs/hf")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=192, help="windows to train on")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--workers", type=int, default=0)
    options = parser.parse_args()

    set_seed(1)
    window = 64
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("a*.py"))
    text = b"".join(file.read_bytes() for file in files)[: (options.samples + 48) * window]
    split = options.samples * window

    config = GPT2Config(
        vocab_size=256, n_positions=window, n_embd=48, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    arguments = TrainingArguments(
        output_dir=options.output_dir,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=8,
        gradient_accumulation_steps=options.accumulate,
        learning_rate=3e-3,
        warmup_steps=3,
        lr_scheduler_type="cosine",
        weight_decay=0.1,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=5,
        save_strategy="steps",
        save_steps=5,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        dataloader_num_workers=options.workers,
        report_to=[],
        use_cpu=True,
        seed=1,
    )
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=Text(text[:split], window),
        eval_dataset=Text(text[split:], window),
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=most_likely,
    )
    result = trainer.train()
    trainer.save_model()
    trainer.save_state()
    metrics: dict[str, Any] = result.metrics
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)


if __name__ == "__main__":
    main()
