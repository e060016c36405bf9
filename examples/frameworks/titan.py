"""Train a small Llama 3 on the text of Python's standard library with TorchTitan 0.3, on CPUs.

torchrun --standalone --nproc-per-node 3 examples/frameworks/titan.py --dump_folder runs/titan
tpwrap --nodes 3 --spares 1 python examples/frameworks/titan.py --dump_folder runs/titan

TorchTitan is made for GPUs. What it takes to run it without: the device's name and functions (`on_cpu`), an attention
that has a backward pass there (`ScaledDotProductAttention`), and data parallelism without FSDP2 (`replicated`, through
the model's own `parallelize_fn`). On GPUs, drop these three.
"""

import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.utils.data import IterableDataset
from torchtitan import train
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import Validator
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer


def on_cpu() -> None:
    """Names the CPU as TorchTitan's device, with the functions of a device that `torch.cpu` lacks."""
    cpu: Any = torch.cpu
    cpu.get_device_name = lambda device=None: "CPU"
    cpu.current_device = lambda: 0
    cpu.get_device_properties = lambda device=None: SimpleNamespace(total_memory=1 << 30)
    cpu.reset_peak_memory_stats = cpu.empty_cache = lambda: None
    cpu.memory_stats = lambda device=None: {}
    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan.") and hasattr(module, "device_type"):
            vars(module).update(device_type="cpu", device_module=cpu)
    distributed: Any = dist
    if not hasattr(dist, "set_timeout"):  # its name since PyTorch 2.14
        distributed.set_timeout = dist.distributed_c10d._set_pg_timeout


class Bytes(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int], *args: Any, **kwargs: Any) -> str:
        return bytes(tokens).decode(errors="replace")

    def get_vocab_size(self) -> int:
        return 256


class Text(IterableDataset[tuple[dict[str, torch.Tensor], torch.Tensor]]):
    """This rank's windows of the text, again and again; `state_dict` holds the place in it."""

    def __init__(self, tokens: list[int], window: int, rank: int, world_size: int) -> None:
        self.tokens, self.window, self.rank, self.world_size, self.place = tokens, window, rank, world_size, 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        windows = (len(self.tokens) - 1) // self.window
        while True:
            start = (self.place * self.world_size + self.rank) % windows * self.window
            self.place += 1
            text = torch.tensor(self.tokens[start : start + self.window + 1])
            yield {"input": text[:-1], "positions": torch.arange(self.window)}, text[1:]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class TextLoader(ParallelAwareDataloader):
    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        dataset: str = "argparse.py"
        infinite: bool = True

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: BaseTokenizer,
        seq_len: int,
        local_batch_size: int,
        **rest: Any,
    ) -> None:
        text = (Path(sysconfig.get_paths()["stdlib"]) / config.dataset).read_text()
        dataset = Text(tokenizer.encode(text), seq_len, dp_rank, dp_world_size)
        super().__init__(dataset, dp_rank=dp_rank, dp_world_size=dp_world_size, batch_size=local_batch_size)


def replicated(model: nn.Module, **rest: Any) -> nn.Module:
    return replicate(model)


def tiny() -> Trainer.Config:
    spec = model_registry("debugmodel")
    layers = spec.model.layers[:2]
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model = replace(spec.model, layers=layers)
    return Trainer.Config(
        model_spec=replace(spec, model=model, parallelize_fn=replicated, state_dict_adapter=None),
        tokenizer=Bytes.Config(),
        dataloader=TextLoader.Config(),
        loss=CrossEntropyLoss.Config(),
        optimizer=default_adamw(lr=8e-4, implementation="foreach"),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=2, global_batch_size=12, seq_len=64, steps=12, disable_cuda_graphs=True
        ),
        parallelism=ParallelismConfig(
            data_parallel_replicate_degree=3, data_parallel_shard_degree=1, spmd_backend="partial_dtensor"
        ),
        activation_checkpoint=None,
        metrics=MetricsProcessor.Config(log_freq=1, enable_tensorboard=True),
        validator=Validator.Config(enable=True, freq=5, steps=2, dataloader=TextLoader.Config(dataset="ast.py")),
        checkpoint=CheckpointManager.Config(enable=True, interval=5, keep_latest_k=2),
        debug=DebugConfig(seed=7, enable_structured_logging=False),
    )


if __name__ == "__main__":
    on_cpu()
    sys.argv[1:1] = ["--module", "titan", "--config", "tiny"]
    sys.path.insert(0, str(Path(__file__).parent))
    train.main()
