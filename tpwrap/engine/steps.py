"""Steps as the engine sees them: boundaries, publication, commit, and a newcomer's way to its step.

A newcomer that enters at step k >= 1 runs the loop body of the last committed step (k-1) once *offline*: collectives
answer at once with its own data, and what the body computes is thrown away. This puts DDP's buckets into the phase that
the survivors' are in, imports whatever the first backward imports, and brings the Python stack to the exit of
optimizer.step() number k, where the newcomer's state is set to the real one and it goes live. The rest of the body
(scheduler, log lines) is the survivors' present, and runs for real.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from tpwrap.control.messages import Notice, Plan
from tpwrap.control.sidecars import SETUP_STEP
from tpwrap.engine import ddp, encoding, join, randomness, scalers, shards
from tpwrap.engine.buffers import LocalBuffers
from tpwrap.engine.data import Origin, iterator_at
from tpwrap.engine.script import trace
from tpwrap.engine.sidecar import Sidecar
from tpwrap.engine.state import ReplicaState, loaded

if TYPE_CHECKING:
    from collections.abc import Callable

    from tpwrap.engine.runtime import Runtime
    from tpwrap.engine.session import Batches, Session

_LATE_CHECKS = 20
"""steps in which the engine looks whether random state moved between backward and the end of the update"""


class Steps:
    """The engine's side of a session."""

    def __init__(
        self,
        runtime: Runtime,
        session: Session,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any | None,
    ) -> None:
        self.state = ReplicaState(model, optimizer, scheduler)
        self.scalars: dict[int, bytes] = {}
        """encoded scalars as of the newest two commits"""
        self._runtime = runtime
        self._session = session
        self._model = model
        self._optimizer = optimizer
        self._buffers = LocalBuffers(model)
        self._begun = False
        self._fresh = True
        """the next batch is the first one of a step"""
        self._origin: Origin | None = None
        self._losses: list[torch.Tensor] = []
        self._published: Sidecar | None = None
        self._told: set[str] = set()
        self._told_of_redo = False
        self._offline: Sidecar | None = None
        """the sidecar that the offline body is fed with; None when live"""
        self._losses_fed = 0
        self._trace = trace.Trace.begin(runtime.rank, session=True)
        runtime.attach(self)
        runtime.redo.of(self._capture)
        if shards.flattened(model):
            runtime.unprotect(shards.FLATTENED)
        if not runtime.live:
            self._go_offline()
        self._wrap(optimizer)
        self._inject_hooks()
        runtime.injector.at("setup", SETUP_STEP)

    @property
    def step(self) -> int:
        """Updates applied by this rank, -1 before its first step boundary."""
        return self._session.updates if self._begun else SETUP_STEP

    # --- the way in -------------------------------------------------------------------------------

    def _go_offline(self) -> None:
        """A newcomer: unless it enters before the first batch, the body of the last committed step comes first."""
        plan = self._runtime.wait_plan()
        if plan.step >= 1:
            self._offline = join.sidecar_of(self._runtime, plan)
            self._session.updates = plan.step - 1

    def first_epoch(self, start: int) -> int:
        return start if self._offline is None else self._offline_origin().epoch

    def _offline_origin(self) -> Origin:
        assert self._offline is not None
        assert self._offline.origin is not None  # only the sidecar of step 0 has none, and nobody enters with it here
        return self._offline.origin

    def before_batch(self, batches: Batches) -> None:
        """At every `next()` of a pass. Raises StopIteration for a pass that was over before a newcomer's entry."""
        if not self._begun and self._offline is None:
            self._begin()
        if self._offline is not None:
            self._begun = True
            origin = self._offline_origin()
            if batches.iterator is None and self._fresh:
                if batches.passes < origin.passes:
                    raise StopIteration
                batches.iterator = iterator_at(batches.loader, origin)
                batches.at_pass = origin.at_pass
                self._session.batch_index = origin.batch - 1
            return
        self._runtime.injector.at("between", self._session.updates)
        if batches.iterator is None:
            batches.at_pass = randomness.capture()
            batches.iterator = iter(batches.loader)
        if self._fresh:
            self._origin = Origin(
                epoch=self._session.epoch,
                passes=batches.passes,
                batch=self._session.batch_index + 1,
                at_pass=batches.at_pass,
                at_batch=randomness.capture(),
            )

    def batch_taken(self, batch: Any) -> None:
        self._fresh = False
        if self._trace is not None and self._offline is None:
            self._trace.batch(batch)

    def _begin(self) -> None:
        """The first step boundary: set-up is over."""
        runtime = self._runtime
        if not runtime.live:
            self._begun = True
            if not join.join(runtime, self, 0):
                self._go_offline()  # the survivors have gone on by a step since this newcomer was started
            return
        runtime.publisher.publish(SETUP_STEP, join.encode_setup(runtime))
        runtime.publisher.publish(0, self._sidecar(0).encode())
        self.scalars[0] = self.state.scalars()
        with runtime.gate:  # a recovery must see set-up or step 0, nothing in between
            self._begun = True
            runtime.journal.step = 0
        runtime.setup_done(self._shard())
        runtime.injector.step_begins(0, runtime.journal)

    def _shard(self) -> str:
        return self._session.shard or shards.shard(self.state.parameters(), [self._optimizer])

    # --- redo -------------------------------------------------------------------------------------

    @property
    def offline(self) -> bool:
        """This is a newcomer before its entry."""
        return self._offline is not None

    @property
    def will_update(self) -> bool | None:
        """Of a newcomer before its entry: whether the failed rank has updated after as many backward passes; None when
        live."""
        return None if self._offline is None else self._losses_fed >= len(self._offline.losses)

    def _capture(self) -> Callable[[], None]:
        """Note what a step's body changes before its update; returns what puts it back."""
        self._runtime.votes.ask(True, self._shard)  # not only at the update: a failure in the first step is redone, too
        session = self._session
        # A forward pass without a backward pass (an evaluation) leaves FSDP2's root gathered, and then the next one
        # needs no collective; but a poisoned pass does not, and the newcomer would wait for one that never comes.
        for module in self._model.modules():
            if isinstance(module, loaded("torch.distributed.fsdp", "FSDPModule")):
                module.reshard()
        random, scalars, scale = randomness.capture(), self.state.scalars(), scalers.capture()
        buffers = {name: buffer.clone() for name, buffer in self._buffers.changed().items()}
        registered = encoding.encode({name: get() for name, (get, _) in session._registered.items()})
        gradients = [(parameter, parameter.grad) for _, parameter in self.state.parameters()]
        batch_index, losses = session.batch_index, len(self._losses)

        def put_back() -> None:
            # A gradient that was there is the last step's: the body sets it to None, or to zero, before it adds to it.
            for parameter, gradient in gradients:
                parameter.grad = gradient
            self._buffers.restore(buffers)
            self.state.restore_scalars(scalars)
            scalers.put_back(scale)
            for name, value in encoding.decode(registered).items():
                session._registered[name][1](value)
            session.batch_index = batch_index
            del self._losses[losses:]
            randomness.restore(random)

        return put_back

    # --- backward: publication --------------------------------------------------------------------

    def on_backward(self, roots: list[torch.Tensor]) -> None:
        """Called before every backward pass with the tensors it starts from."""
        if not self._begun or self._runtime.poisoned:
            return
        small = [root for root in roots if root.numel() <= 64]
        if self._offline is not None:
            fed = self._offline.losses
            with torch.no_grad():
                for root in small:
                    if self._losses_fed < len(fed) and fed[self._losses_fed].shape == root.shape:
                        root.data.copy_(fed[self._losses_fed])
                    self._losses_fed += 1
            return
        if self._trace is not None:
            for root in roots:
                self._trace.loss(root)
        self._losses += [root.detach().clone() for root in small]
        if ddp.will_synchronize():
            self._publish()

    def _publish(self) -> None:
        step = self._session.updates + 1
        state = self._sidecar(step)
        self._published = state
        self._runtime.publisher.publish(step, state.encode())

    def _sidecar(self, step: int) -> Sidecar:
        return Sidecar(
            step,
            self._origin,
            random=randomness.capture(),
            losses=self._losses,
            buffers=self._buffers.changed(),
            registered={name: get() for name, (get, _) in self._session._registered.items()},
            scalers=scalers.capture(),
        )

    # --- commit -----------------------------------------------------------------------------------

    def _wrap(self, optimizer: torch.optim.Optimizer) -> None:
        original = optimizer.step

        @functools.wraps(original)  # with it the mark by which a scheduler knows its own wrapper
        def step(*args: Any, **kwargs: Any) -> Any:
            if self._offline is not None:
                return self._offline_step(optimizer)
            if any(callable(argument) for argument in (*args, *kwargs.values())):
                raise RuntimeError(
                    "optimizer.step(closure) is not supported under tpwrap: a failure inside the closure could not be "
                    "healed; compute loss and backward() before optimizer.step()"
                )
            number = self._session.updates
            runtime = self._runtime
            runtime.raise_if_poisoned()
            runtime.injector.at("optimizer", number)
            if number == 0 and runtime.communicators.has_first:
                runtime.publisher.publish(SETUP_STEP, join.encode_setup(runtime))
            runtime.votes.ask(False, self._shard)
            runtime.votes.before_update(number)
            with runtime.gate:
                result = original(*args, **kwargs)
                self._commit()
            runtime.injector.at("commit", number)
            if self._trace is not None and self._trace.done(number + 1):
                trace.leave(runtime, number + 1)
            return result

        optimizer.step = step  # type: ignore[method-assign]

    def _commit(self) -> None:
        """The update is applied. Runs inside the commit gate."""
        self._runtime.redo.committed()
        step = self._session.updates = self._session.updates + 1
        self._check_publication(step)
        self.scalars[step] = self.state.scalars()
        self.scalars.pop(step - 2, None)
        if self._trace is not None:
            session = self._session
            values = {name: get() for name, (get, _) in session._registered.items()}
            values |= {"tp.epoch": session.epoch, "tp.batch_index": session.batch_index}
            self._trace.commit(step, self.state.digests(), self.scalars[step], values, randomness.capture())
        self._begin_step(step)
        if self._runtime.redo.used and not self._told_of_redo and self._runtime.journal.stats()["too_large"]:
            self._told_of_redo = True
            budget = self._runtime.budget / (1 << 20)
            text = f"the collectives of a step exceed {budget:g} MB: a failure in it is healed by running it again"
            self._runtime.send(Notice("info", text))
        self._runtime.progress(step)

    def _begin_step(self, step: int) -> None:
        self._fresh = True
        self._session._served.clear()
        self._losses = []
        self._published = None
        self._runtime.journal.step = step
        self._runtime.injector.step_begins(step, self._runtime.journal)

    def _check_publication(self, step: int) -> None:
        if self._published is None:
            self._publish()
            self._tell(
                "no backward() was seen in this step, so its state was published only after the update: "
                "a failure just before that cannot be healed; call loss.backward() in every step"
            )
        elif step <= _LATE_CHECKS and self._published.random != randomness.capture():
            self._publish()
            self._tell(
                "random numbers are drawn between backward() and the end of optimizer.step(): "
                "a failure in that window would not be healed bit for bit; draw them before backward()"
            )

    def _offline_step(self, optimizer: torch.optim.Optimizer) -> None:
        """A newcomer's optimizer.step(): the place where it becomes live, if its step has come."""
        step = self._session.updates + 1
        optimizer._opt_called = True  # type: ignore[attr-defined]  # for the scheduler's order check
        self._session.updates = step
        if not join.join(self._runtime, self, step):
            self._fresh = False  # one more offline body: the survivors have gone on by a step meanwhile
            self._losses_fed = 0

    def state_at(self, step: int) -> ReplicaState:
        """What replicas hold at `step`."""
        return self.state

    def announce(self) -> None:
        """A newcomer is about to report that it is ready."""

    def readings_before(self, step: int) -> bytes:
        """Only a script as it is has them."""
        return b""

    def blob(self, plan: Plan) -> bytes:
        """The sidecar with which a newcomer enters by this plan."""
        return join.fetch(self._runtime, plan)

    def entered(self, step: int, blob: bytes, scalars: bytes) -> dict[str, int]:
        """The newcomer's state is that of `step`; called by join, last thing before it goes live. Returns what it has
        left out on its way: nothing."""
        restored = Sidecar.decode(blob)
        self._buffers.restore(restored.buffers)
        for name, value in restored.registered.items():
            if name in self._session._registered:
                self._session._registered[name][1](value)
        scalers.restore(restored.scalers, encoding.decode(scalars)["optimizers"]["optimizer"]["skipped"])
        self._offline = None
        self._runtime.journal.step = step
        self.scalars = {step: scalars}
        self._begin_step(step)
        randomness.restore(restored.random)
        return {}

    # --- helpers ----------------------------------------------------------------------------------

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._runtime.send(Notice("warning", text))

    def _inject_hooks(self) -> None:
        """Hooks for the injector, only where a fault asks for them."""
        injector, session = self._runtime.injector, self._session

        def fire(phase: str) -> None:
            if self._offline is None and self._begun:
                injector.at(phase, session.updates)

        if injector.wants("forward"):
            self._model.register_forward_pre_hook(lambda *_: fire("forward"))
        if injector.wants("backward"):
            # At an output, not at a parameter: FSDP2 trains others than those that it shows.
            leaves = [one for one in self._model.modules() if not any(True for _ in one.children())]
            leaves[len(leaves) // 2].register_forward_hook(_when_graded(lambda: fire("backward")))


def _when_graded(fire: Callable[[], None]) -> Callable[[Any, Any, Any], None]:
    """A forward hook that calls `fire` in the backward pass, when the gradient of the output is known."""

    def hook(_module: Any, _inputs: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(lambda _: fire())

    return hook


def install_backward_hook(runtime: Runtime) -> None:
    """Tell the session before every backward pass (`Tensor.backward` calls this function too)."""
    original = torch.autograd.backward

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if runtime.steps is not None:
            runtime.steps.on_backward([tensors] if isinstance(tensors, torch.Tensor) else list(tensors))
        return original(tensors, *args, **kwargs)

    torch.autograd.backward = backward
