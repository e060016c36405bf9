"""Three dimensions on eight ranks."""

from __future__ import annotations

import contextlib
from typing import Any

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import Schedule1F1B

from tests.parallel.kinds.base import Trainee
from tests.parallel.kinds.fully_sharded import sharded
from tests.parallel.kinds.pipeline import Pipelined, split
from tests.parallel.kinds.tensor import clip_mixed, parallel
from tests.parallel.parts import Net, Options


class HybridShardedTensorParallel(Trainee):
    """Replicas x FSDP2 x tensor parallel."""

    def __init__(self, options: Options) -> None:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
        net = parallel(Net(options), mesh["tp"])
        super().__init__(options, sharded(net, mesh["replicate", "shard"], options))
        self.data_rank, self.data_world = self_rank(mesh), 4

    @contextlib.contextmanager
    def synchronized(self, last: bool) -> Any:
        self.model.set_requires_gradient_sync(last)
        yield

    def clip(self) -> None:
        clip_mixed(self.model)


def self_rank(mesh: Any) -> int:
    """Among the ranks with the same place in the tensor-parallel dimension."""
    return 2 * mesh["replicate"].get_local_rank() + mesh["shard"].get_local_rank()


def hsdp_tp(options: Options) -> Trainee:
    return HybridShardedTensorParallel(options)


def pp_tp_dp(options: Options) -> Trainee:
    """Pipeline x tensor parallel x replicas."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    place = mesh["pp"].get_local_rank()
    stage = split(parallel(Net(options), mesh["tp"]), 2)[place]
    return Pipelined(options, mesh, {place: stage}, 2).pipeline(Schedule1F1B)
