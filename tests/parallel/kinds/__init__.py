"""The parallelisms: each module builds a mesh or groups, and a model on them. `trainee` finds one by its name."""

from __future__ import annotations

import importlib

from tests.parallel import facts
from tests.parallel.kinds.base import Trainee
from tests.parallel.parts import Options


def trainee(options: Options) -> Trainee:
    kind = (facts.KINDS | facts.UNHEALED)[options.kind]
    module = importlib.import_module(f"tests.parallel.kinds.{kind.module}")
    made: Trainee = getattr(module, options.kind)(options)
    return made
