"""What of a script is protected, judged from what the engine has recognised in it.

`judge(facts)` says it as findings, `render` in words: one block of a few lines at the start of a run. A promise is made
only for what the facts prove. Whatever else is known is a finding of its own: a *note* where it is exact under a
condition that the engine cannot see, *unprotected* where a failure would not be healed, or not to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, TypeAlias

import msgspec

Level: TypeAlias = Literal["protected", "note", "unprotected"]

TWO_LINES = "use the two lines (tpwrap.session, tp.batches)"
_FAR = 10_000
"""updates: what a run may well have done when it fails"""
_SLOW = 60.0
"""seconds to enter after so many updates that are worth a note"""
_SURE = 3
"""updates after which a time for each can be told: the first one imports and compiles"""
_LONG = 1 << 30
"""bytes of tape after so many updates that are worth a note"""


class Loader(msgspec.Struct, frozen=True):
    """A loader whose batches the training loop takes."""

    kind: Literal["map", "iterable", "own"] = "map"
    """of the data set; own: no DataLoader, an iterable of the script"""
    samples: int | None = None
    """None: unknown"""
    workers: int = 0
    persistent: bool = False
    sampler: str = ""
    """class of the sampler; "" where it has none or the usual one"""
    where: str = ""
    """here and below: where in the script, "train.py:57"; "" where that cannot be told"""


class Model(msgspec.Struct, frozen=True):
    """A module whose parameters an optimizer updates."""

    name: str
    """its class, without the wrapper"""
    parameters: int
    """how many numbers"""
    wrapper: str = ""
    """"DDP", or "" where nothing wraps it"""
    sharded: str = ""
    """what holds only a part of it on each rank, "FSDP2" for instance; "" where every rank has all of it"""
    where: str = ""


class Place(msgspec.Struct, frozen=True):
    """Something at a line of the script.

    what: as the script calls it, a variable or an expression; may be "".
    """

    what: str
    where: str = ""


class Large(msgspec.Struct, frozen=True):
    """A tensor that lives over the end of backward() and is too large to be sent with every step."""

    path: str
    """how the script reaches it, "outputs" or "self.cache['k']" """
    bytes: int
    where: str = ""


class Finding(msgspec.Struct, frozen=True):
    """One thing that a person should know.

    topic: what it is about, the same on every rank and at every step though the words hold other numbers.
    what: a clause. where: see `Loader.where`. fix: what to do about it; "" for what is protected.
    """

    level: Level
    topic: str
    what: str
    where: str = ""
    fix: str = ""

    @property
    def key(self) -> str:
        """Two findings with the same key say the same."""
        return f"{self.topic} {self.where}"


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine has recognised of a script on one rank, after `step` updates."""

    script: str
    """its name, "train.py" """
    step: int
    """updates applied when the facts were taken"""
    world_size: int
    session: bool = False
    """the script has the two lines"""
    adapters: tuple[str, ...] = ()
    """frameworks that are known by name and active, "Hugging Face Trainer" for instance"""
    loaders: tuple[Loader, ...] = ()
    models: tuple[Model, ...] = ()
    optimizers: tuple[str, ...] = ()
    """class names, here and in the next two"""
    schedulers: tuple[str, ...] = ()
    scalers: tuple[str, ...] = ()
    buddies: int = 0
    """other nodes that keep this rank's sidecar; the coordinator fills it in"""
    sidecar_bytes: int = 0
    """that go to each buddy in a step, tape included; 0: not known yet"""
    journal_bytes: int = 0
    """inputs of the collectives of a step; 0: not known yet"""
    journal_budget: int = 0
    """bytes; 0: not known"""
    tape_bytes: float = 0.0
    """that a step adds to the tape for ever"""
    forward_seconds: float = 0.0
    """to fast-forward over one step"""
    large: tuple[Large, ...] = ()
    from_update: tuple[Place, ...] = ()
    """values read after optimizer.step() that come from gradients or parameters"""
    threads: tuple[Place, ...] = ()
    """started by the script and alive"""
    drawn_in_update: tuple[Place, ...] = ()
    """random numbers drawn between the last backward() and the end of optimizer.step()"""
    closures: tuple[Place, ...] = ()
    """calls of optimizer.step(closure)"""
    weights: str = ""
    """digest of what replicas should hold in common after `step` updates; "" where it was not taken"""
    others: tuple[Finding, ...] = ()
    """what other parts of the engine have to say"""


def judge(facts: Facts) -> list[Finding]:
    """All findings, what is protected first, then what is not, then the notes. Nothing is called protected where no
    failure can be healed at all."""
    hopeless = [finding for rule in _HOPELESS for finding in rule(facts)]
    found = hopeless + [finding for rule in _RULES for finding in rule(facts)] + list(facts.others)
    if not hopeless:
        found = [*_protected(facts), *found]
    order: dict[Level, int] = {"protected": 0, "unprotected": 1, "note": 2}
    return sorted({finding.key: finding for finding in found}.values(), key=lambda finding: order[finding.level])


def unprotected(findings: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level == "unprotected"]


# --- what is protected --------------------------------------------------------------------------------


def _protected(facts: Facts) -> Iterator[Finding]:
    parts = (
        ("weights", facts.models),
        ("optimizer", facts.optimizers),
        ("schedule", facts.schedulers),
        ("loss scale", facts.scalers),
        ("random state", True),
        ("place in the data", facts.loaders),
        ("the script's variables", not facts.session),
        ("what is registered", facts.session),
    )
    for name, there in parts:
        if there:
            yield Finding("protected", name, name)


# --- rules: nothing can be healed ---------------------------------------------------------------------


def _alone(facts: Facts) -> Iterator[Finding]:
    if facts.world_size == 1:
        yield Finding(
            "unprotected", "alone", "the job has one rank, so no other one has a copy of its weights", "",
            "run two ranks or more, or write checkpoints",
        )  # fmt: skip


def _sharded(facts: Facts) -> Iterator[Finding]:
    for model in facts.models:
        if model.sharded:
            yield Finding(
                "unprotected", f"sharded {model.name}",
                f"{model.name} is sharded ({model.sharded}), which a script as it is cannot carry over a failure",
                model.where, "add the two lines of tpwrap.session (docs/sharded.md)",
            )  # fmt: skip


def _closures(facts: Facts) -> Iterator[Finding]:
    for place in facts.closures:
        yield Finding(
            "unprotected", "closure", "optimizer.step(closure) runs backward() inside the update", place.where,
            "compute the loss and call backward() before optimizer.step()",
        )  # fmt: skip


def _journal(facts: Facts) -> Iterator[Finding]:
    if 0 < facts.journal_budget < facts.journal_bytes:
        enough = -(-2 * facts.journal_bytes // (1 << 20))
        yield Finding(
            "unprotected", "journal",
            f"the collectives of a step take {size(facts.journal_bytes)}, more than the {size(facts.journal_budget)} "
            "that may be kept for replay", "",
            f"set TORCHPASS_REPLAY_BUDGET_MB={enough} if the hosts have that memory for each rank",
        )  # fmt: skip


# --- rules: one thing is not exact ----------------------------------------------------------------------


def _large(facts: Facts) -> Iterator[Finding]:
    for tensor in facts.large:
        yield Finding(
            "unprotected", f"large {tensor.path}", f"`{tensor.path}` ({size(tensor.bytes)}) is read after backward()",
            tensor.where, f"compute what you need of it before backward(), or {TWO_LINES}",
        )  # fmt: skip


def _from_update(facts: Facts) -> Iterator[Finding]:
    for place in facts.from_update:
        yield Finding(
            "unprotected", f"from update {place.what}",
            f"{_named(place, 'a value')} comes from gradients or parameters and is read after optimizer.step()",
            place.where, "read it before optimizer.step()",
        )  # fmt: skip


def _drawn(facts: Facts) -> Iterator[Finding]:
    for place in facts.drawn_in_update:
        yield Finding(
            "unprotected", "drawn", "random numbers are drawn between backward() and the end of optimizer.step()",
            place.where, "draw them before backward()",
        )  # fmt: skip


# --- rules: exact under a condition -----------------------------------------------------------------------


def _plain_models(facts: Facts) -> Iterator[Finding]:
    for model in facts.models:
        if facts.world_size > 1 and not model.wrapper and not model.sharded:
            yield Finding(
                "note", f"plain {model.name}", f"{model.name} is not wrapped in DistributedDataParallel", model.where,
                "healing needs its weights to be equal on all ranks; where they are not, the first recovery ends the "
                "job with exit code 70",
            )  # fmt: skip


def _loaders(facts: Facts) -> Iterator[Finding]:
    for loader in facts.loaders:
        if loader.kind == "iterable":
            yield Finding(
                "note", "iterable", "an IterableDataset", loader.where,
                "a newcomer fetches the earlier batches of the pass and drops them, and what the data set yields must "
                "not depend on random numbers drawn in the training process",
            )  # fmt: skip
        elif loader.workers:
            yield Finding(
                "note", "workers", f"a loader with {_count(loader.workers, 'worker')}", loader.where,
                "a newcomer fetches the earlier batches of the pass and drops them",
            )  # fmt: skip
        if loader.persistent and loader.workers:
            yield Finding(
                "note", "persistent", "persistent workers", loader.where,
                "exact only if the data set draws no random numbers, since what workers drew in earlier passes is "
                "lost; give persistent_workers=False where it does",
            )  # fmt: skip


def _threads(facts: Facts) -> Iterator[Finding]:
    for place in facts.threads:
        yield Finding(
            "note", f"thread {place.what}", f"{_named(place, 'a thread')} is a thread of the script", place.where,
            "a newcomer starts it anew; it must not change what the training computes",
        )  # fmt: skip


def _slow(facts: Facts) -> Iterator[Finding]:
    seconds = facts.forward_seconds * _FAR
    if not facts.session and facts.step >= _SURE and seconds > _SLOW:
        yield Finding(
            "note", "slow",
            f"a newcomer runs the script's own code for all earlier steps, about {seconds:.0f} s after {_FAR:,} steps",
            "", f"to save that, {TWO_LINES}",
        )  # fmt: skip


def _long_tape(facts: Facts) -> Iterator[Finding]:
    total = facts.tape_bytes * _FAR
    if not facts.session and total > _LONG:
        yield Finding(
            "note", "tape", f"each buddy keeps a record of this rank that is {size(total)} after {_FAR:,} steps", "",
            f"read fewer numbers (.item(), .tolist(), .numpy()) in each step, or {TWO_LINES}",
        )  # fmt: skip


def _no_buddy(facts: Facts) -> Iterator[Finding]:
    if facts.world_size > 1 and facts.buddies == 0:
        yield Finding(
            "note", "no buddy", "all ranks are on one node, and nobody else keeps their random state and variables", "",
            "the loss of a process can be healed, the loss of the node cannot: add nodes or spares",
        )  # fmt: skip


_Rule: TypeAlias = Callable[[Facts], Iterator[Finding]]
_HOPELESS: tuple[_Rule, ...] = (_alone, _sharded, _closures, _journal)
_RULES: tuple[_Rule, ...] = (
    _large, _from_update, _drawn, _plain_models, _loaders, _threads, _slow, _long_tape, _no_buddy,
)  # fmt: skip


# --- in words -------------------------------------------------------------------------------------------


def render(facts: Facts, findings: Sequence[Finding]) -> list[str]:
    """The block at the start: what was recognised, what is protected, what is not and what to do."""
    how = "with the two lines" if facts.session else "as it is"
    lines = [f"{facts.script} {how}: {recognised(facts)}"]
    parts = [finding.what for finding in findings if finding.level == "protected"]
    if parts:
        lines.append("protected: " + ", ".join(parts) + _sent(facts))
    return lines + [line for finding in findings if (line := one_line(finding)) is not None]


def one_line(finding: Finding) -> str | None:
    """A finding by itself; None for what is protected."""
    if finding.level == "protected":
        return None
    place = f" ({finding.where})" if finding.where else ""
    fix = f": {finding.fix}" if finding.fix else ""
    return f"{'NOT protected' if finding.level == 'unprotected' else 'note'}: {finding.what}{place}{fix}"


def recognised(facts: Facts) -> str:
    """'1 loader (384 samples, 2 workers), 1 model (DDP, 1.2 M parameters), AdamW'."""
    parts = list(facts.adapters)
    parts += _several(facts.loaders, "loader", _loader)
    parts += _several(facts.models, "model", _model)
    parts += [*facts.optimizers, *facts.schedulers, *facts.scalers]
    return ", ".join(parts) or "nothing"


def _several(things: Sequence[msgspec.Struct], noun: str, words: Callable[..., str]) -> list[str]:
    if not things:
        return []
    shown = [text for thing in things[:3] if (text := words(thing))]
    more = ["…"] if len(things) > 3 else []
    return [_count(len(things), noun) + (f" ({'; '.join(shown + more)})" if shown else "")]


def _loader(loader: Loader) -> str:
    parts = {"map": [], "iterable": ["IterableDataset"], "own": ["an iterable of the script"]}[loader.kind]
    parts += [f"{loader.samples} samples"] if loader.samples is not None else []
    parts += [_count(loader.workers, "worker")] if loader.workers else []
    parts += [loader.sampler] if loader.sampler else []
    return ", ".join(parts)


def _model(model: Model) -> str:
    wrapper = [model.sharded or model.wrapper] if model.sharded or model.wrapper else []
    return ", ".join([*wrapper, f"{_number(model.parameters)} parameters"])


def _sent(facts: Facts) -> str:
    if not facts.sidecar_bytes or not facts.buddies:
        return ""
    buddies = "a buddy" if facts.buddies == 1 else f"{facts.buddies} buddies"
    return f"; {size(facts.sidecar_bytes)} a step to {buddies}"


def size(count: float) -> str:
    """Bytes for a person: '0.3 kB', '4.2 MB'."""
    for unit, bytes_each in (("GB", 1e9), ("MB", 1e6)):
        if count >= bytes_each / 10:
            return f"{count / bytes_each:.1f} {unit}"
    return f"{count / 1e3:.1f} kB"


def _number(count: int) -> str:
    for unit, each in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= each:
            return f"{count / each:.1f} {unit}"
    return str(count)


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _named(place: Place, otherwise: str) -> str:
    return f"`{place.what}`" if place.what else otherwise


# --- what is new ------------------------------------------------------------------------------------------


class Told(msgspec.Struct, frozen=True):
    """What people have been told about this job, and what waits for rank 0's block."""

    step: int = -1
    """of rank 0's last facts; -1: its block was not shown yet"""
    keys: frozenset[str] = frozenset()
    """of the findings that were shown"""
    early: tuple[tuple[int, Facts], ...] = ()
    """from other ranks, before that"""


class Report(msgspec.Struct, frozen=True):
    """What to tell now about one rank. findings: those that are new."""

    rank: int
    lines: list[str]
    findings: list[Finding]


def compared(facts: Facts, rank: int, first: tuple[int, str]) -> Facts:
    """The facts of `rank` with what follows from those of another rank (its number and digest) at the same step."""
    other, digest = first
    if digest == facts.weights:
        return facts
    finding = Finding(
        "unprotected", "weights differ",
        f"after {_count(facts.step, 'update')} rank {rank} holds other weights than rank {other}", "",
        "wrap the model in DistributedDataParallel, or average its gradients on all ranks before optimizer.step()",
    )  # fmt: skip
    return msgspec.structs.replace(facts, others=(*facts.others, finding))


def news(told: Told, rank: int, facts: Facts) -> tuple[Told, list[Report]]:
    """What is new in a rank's facts: rank 0's whole block once; later, and from other ranks, what was not said yet
    (of other ranks only what is unprotected; the rank is named where rank 0 does not say the same)."""
    if rank != 0 and told.step < 0:
        return msgspec.structs.replace(told, early=(*told.early, (rank, facts))), []
    findings = judge(facts)
    if rank == 0 and told.step < 0:
        reports = [Report(0, render(facts, findings), findings)]
        early = told.early
        told = Told(facts.step, frozenset(finding.key for finding in findings))
        for other, theirs in early:
            told, more = news(told, other, theirs)
            reports += more
        return told, reports
    new = [
        finding
        for finding in findings
        if finding.key not in told.keys and (finding.level == "unprotected" or (rank == 0 and finding.level == "note"))
    ]
    who = f"rank {rank}: " if rank and facts.step <= told.step else ""
    if rank == 0:
        told = msgspec.structs.replace(told, step=max(told.step, facts.step))
    if not new:
        return told, []
    lines = [who + line for finding in new if (line := one_line(finding)) is not None]
    keys = told.keys | {finding.key for finding in new}
    return msgspec.structs.replace(told, keys=keys), [Report(rank, lines, new)]
