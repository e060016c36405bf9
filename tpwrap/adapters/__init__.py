"""What the engine cannot know by itself about a trainer library: one small module each.

An unmodified script is followed through any library's Python (`tpwrap.engine.script`). An adapter names the few places
where that is not enough: code of the script's own that runs inside a model's call, updates hidden in closures,
questions about files whose answers have changed meanwhile. It is applied when the library is imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tpwrap.adapters.places import Places


class Adapter(NamedTuple):
    """name: of the trainer library; "" for what others are built on. module: on whose import it is applied. code: the
    module of ours whose `apply(places, module)` does it."""

    name: str
    module: str
    code: str


ADAPTERS = (
    Adapter("Hugging Face Trainer", "transformers.trainer", "huggingface"),
    Adapter("Hugging Face Trainer", "transformers.trainer_utils", "huggingface"),
    Adapter("Accelerate", "accelerate.accelerator", "accelerating"),
    Adapter("Accelerate", "accelerate.data_loader", "accelerating"),
    Adapter("Lightning", "lightning.pytorch.strategies.strategy", "lightning"),
    Adapter("Lightning", "lightning.pytorch.plugins.precision.precision", "lightning"),
    Adapter("Lightning", "lightning.fabric.utilities.cloud_io", "lightning"),
    Adapter("Lightning", "lightning.pytorch.callbacks.model_checkpoint", "lightning"),
    Adapter("PyTorch Lightning", "pytorch_lightning.callbacks.model_checkpoint", "lightning"),
    Adapter("PyTorch Lightning", "pytorch_lightning.strategies.strategy", "lightning"),
    Adapter("PyTorch Lightning", "pytorch_lightning.plugins.precision.precision", "lightning"),
    Adapter("PyTorch Lightning", "lightning_fabric.utilities.cloud_io", "lightning"),
    Adapter("TorchTitan", "torchtitan.components.optimizer", "titan"),  # before 0.3
    Adapter("TorchTitan", "torchtitan.components.optimizer.optimizer", "titan"),
    Adapter("TorchTitan", "torchtitan.components.checkpoint", "titan"),  # before 0.3
    Adapter("TorchTitan", "torchtitan.tools.filesystem", "titan"),
    Adapter("TorchTitan", "torchtitan.components.checkpointer.base", "titan"),
    Adapter("TorchTitan", "torchtitan.trainer", "titan"),
    Adapter("TorchTitan", "torchtitan.train", "titan"),  # before 0.3
    Adapter("", "torchdata.stateful_dataloader.stateful_dataloader", "stateful"),
    Adapter("", "fsspec.implementations.local", "files"),
)


def install(places: Places, when_imported: Callable[[str, Callable[[ModuleType], None]], None]) -> None:
    """Have each adapter applied when its library is imported. when_imported(name, then): calls `then(module)` once the
    module of that name is imported, or now."""
    for adapter in ADAPTERS:
        when_imported(adapter.module, partial(_apply, adapter, places))


def _apply(adapter: Adapter, places: Places, module: ModuleType) -> None:
    importlib.import_module(f"tpwrap.adapters.{adapter.code}").apply(places, module)
    if adapter.name and adapter.name not in places.applied:
        places.applied.append(adapter.name)
