"""The vote before an update: no rank changes a parameter before all ranks have finished all operations of the step.

Needed where not every rank is a replica of every other one, or where steps are redone: then a survivor that has applied
update k proves that every rank holds valid gradients of k, so the others may apply it without further word (roll
forward), and one that has not proves nothing was lost. Whether a job votes is one rule for all ranks, told by the
coordinator when all have come to their first update.

The vote is a tiny all-reduce on a communicator of the engine's own, which no journal keeps: after a failure it is not
replayed but decided by the plan, or held again in the new generation.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch._C import _distributed_c10d as c10d

from tpwrap.control.messages import FirstUpdate, Plan
from tpwrap.control.sidecars import SETUP_STEP

if TYPE_CHECKING:
    from collections.abc import Callable

    from tpwrap.engine.runtime import Runtime

_GLANCE = 0.05
"""seconds between looks at a journal that is held, until the control plane says why"""
_PATIENCE = 1.0


class Votes:
    """This worker's part in them. rule: None while it is not known whether the job votes."""

    def __init__(self, runtime: Runtime, rule: bool | None) -> None:
        self.rule = rule
        self._runtime = runtime
        self._asked = False
        self._passed = SETUP_STEP - 1
        """the newest update whose vote has passed"""
        self._ballot: tuple[int, Any] = (-1, None)
        """generation, and its communicator once that stands"""
        self._preparing = -1
        """the newest generation for which that is being built"""

    # --- what the control plane says (link and recovery threads) ----------------------------------

    def told(self, rule: bool) -> None:
        """Every rank has come to its first update, and so past its set-up."""
        self._runtime.journal.all_have(0)
        if rule:
            self.prepare(self._runtime.generation)
        with self._runtime.changed:
            self.rule = rule
            self._runtime.changed.notify_all()

    def prepare(self, generation: int) -> None:
        """Begin to build the communicator of this generation; does not wait. Call it when all ranks do."""
        runtime = self._runtime
        with runtime.changed:
            # The rule may come in the middle of a recovery, before its plan; then the plan's turn comes.
            if runtime.communicators.generation != generation or self._preparing == generation:
                return
            self._preparing = generation

        def build() -> None:
            with contextlib.suppress(RuntimeError):  # the generation was given up
                backend = runtime.communicators.build_own("votes", runtime.rank, runtime.world_size)
                with runtime.changed:
                    if runtime.generation == generation:
                        self._ballot = (generation, backend)
                        runtime.changed.notify_all()

        threading.Thread(target=build, name="torchpass-votes", daemon=True).start()

    def follow(self, plan: Plan) -> None:
        """A plan has come: its rule, and perhaps its word that the update we wait for may be applied."""
        with self._runtime.changed:
            if plan.votes is not None:
                self.rule = plan.votes
            if plan.votes and plan.step > self._runtime.step:
                self._passed = plan.step - 1
            self._runtime.changed.notify_all()
        if self.rule:
            self.prepare(plan.generation)

    def passed(self, update: int) -> bool:
        """Whether this rank will apply that update whatever happens."""
        return self._passed >= update

    # --- the training thread ----------------------------------------------------------------------

    def ask(self, redo: bool, shard: Callable[[], str]) -> None:
        """Ask for the rule, once. redo: whether this rank can run a step's body again. shard: its shard."""
        if self.rule is None and not self._asked:
            self._asked = True
            self._runtime.send(FirstUpdate(redo, shard()))

    def before_update(self, update: int) -> None:
        """Returns once this rank, which has asked, may apply that update (0: the first one). Raises Poisoned."""
        runtime = self._runtime
        if self.rule is None:
            self._wait(lambda: self.rule is not None)
        while self.rule and not self.passed(update):
            runtime.raise_if_poisoned()
            generation = runtime.generation
            if not runtime.journal.settled(_PATIENCE):
                self._wait(lambda: runtime.generation != generation, _GLANCE)  # noqa: B023
            elif self._vote(generation):
                with runtime.changed:
                    # A vote that ends after its generation is not counted: we may have told already that we had none.
                    if runtime.generation == generation:
                        self._passed = update
            else:
                self._wait(lambda: runtime.generation != generation or self.passed(update), _PATIENCE)  # noqa: B023
        if self.rule:
            runtime.journal.all_have(update + 1)

    def _vote(self, generation: int) -> bool:
        """Whether all ranks have come to vote in this generation."""
        runtime = self._runtime
        self._wait(lambda: self._ballot[0] == generation or runtime.generation != generation)
        with runtime.changed:
            number, backend = self._ballot
        if number != generation:
            return False
        ended: list[bool] = []

        def end(future: Any) -> None:
            with runtime.changed:
                try:
                    future.value()
                    ended.append(True)
                except RuntimeError:
                    ended.append(False)
                runtime.changed.notify_all()

        try:
            work = backend.allreduce([torch.ones(1, dtype=torch.uint8)], c10d.AllreduceOptions())
            work.get_future().add_done_callback(end)
        except RuntimeError:
            return False
        # Not work.wait(): an operation of a given-up communicator may never end.
        self._wait(lambda: bool(ended) or runtime.generation != generation)
        return ended == [True]

    def _wait(self, condition: Callable[[], bool], seconds: float | None = None) -> None:
        """Until it holds, or this step is poisoned (then raises Poisoned), or the time is over."""
        runtime = self._runtime
        with runtime.changed:
            runtime.changed.wait_for(lambda: condition() or runtime.poisoned, seconds)
        runtime.raise_if_poisoned()
