"""What of this script is protected, as far as that shows while it runs; told at the start, and when more is known."""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING, Any

from tpwrap.control.messages import Protection
from tpwrap.core import lint
from tpwrap.core.lint import Finding, Large, Place
from tpwrap.engine.script import facts, walk
from tpwrap.engine.script.provenance import Origin

if TYPE_CHECKING:
    from tpwrap.engine.script.script import Script

REPORTED = (0, 1, 3)
"""updates after which more is known"""
WATCHED = (0, 2)
"""updates in which the engine looks where the values come from that the script reads"""
_COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>")
"""names of frames, up to Python 3.11; later ones have no frame of their own"""


class Watch:
    """Looks at a live script."""

    def __init__(self, script: Script) -> None:
        self.sidecar_bytes = 0
        """of the last publication"""
        self._script = script
        self._findings: dict[str, Finding] = {}
        self._closures: list[Place] = []
        self._threads = set(threading.enumerate())
        self._told_of = (0, 0, 0)
        """numbers of findings in the last report"""

    # --- looking ----------------------------------------------------------------------------------

    def begin_window(self, roots: list[Any]) -> None:
        """Between a backward pass and the end of its update: does the script read what nobody else has?"""
        script = self._script
        script.window.open([*script.variables.now().tensors.values(), *roots])
        script.boundary.observer = self._observe

    def begin_tail(self) -> None:
        """After an update: does it read gradients?"""
        self._script.window.open_tail()
        self._script.boundary.observer = self._observe

    def end(self) -> None:
        if self._script.boundary.observer is not None:
            self._script.boundary.observer = None
            self._script.window.close()

    def _observe(self, kind: str, where: str, subjects: tuple[Any, ...]) -> None:
        script = self._script
        provenance = script.window.provenance
        if kind != "v" or provenance is None or provenance.origin(*subjects) is not Origin.LOST:
            return
        if script.just_entered:
            script.boundary.fail(f"{where} reads gradients after optimizer.step(), which only the failed rank had")
        after = script.regions.has_updated
        what = "gradients are read after optimizer.step()" if after else (
            "a value is read between backward() and the end of optimizer.step() that no other rank has"
        )
        fix = "read it before optimizer.step()" if after else "read it before backward(), or after optimizer.step()"
        self._findings[where] = Finding("unprotected", f"lost {where}", what, where, fix)

    # --- further findings -------------------------------------------------------------------------

    def closure(self, where: str) -> None:
        if not self._closures:
            self._closures = [Place("", where)]
            self.report()

    def written_by_descriptor(self, where: str) -> None:
        """The script opens a file for writing by os.open, which nobody mutes in a newcomer."""
        what = "a file is written through os.open"
        self._findings[where] = Finding("unprotected", f"descriptor {where}", what, where, "use open() for it")

    def no_backward(self, where: str) -> None:
        what = "an update comes without a backward pass, so what only this rank knows is not published before it"
        fix = "call loss.backward() for it"
        self._findings[where] = Finding("unprotected", f"no backward {where}", what, where, fix)

    def uncounted(self, where: str) -> None:
        what = "an optimizer updates without optimizer.step() being called by the script"
        self._findings[where] = Finding("unprotected", f"uncounted {where}", what, where, lint.TWO_LINES)

    # --- telling ----------------------------------------------------------------------------------

    def is_due(self) -> bool:
        """Whether there may be something new to tell."""
        return self._script.step in REPORTED or self._told_of != self._counts()

    def _counts(self) -> tuple[int, int, int]:
        boundary, lost = self._script.boundary, self._script.variables.lost
        unseen = bool(self._script.variables.unseen)
        return len(self._findings), len(boundary.too_large) + len(boundary.unmovable) + unseen, len(lost)

    def report(self) -> None:
        """Tell all that is known. Under --strict, what is not protected ends the job here, before a further update."""
        self._told_of = self._counts()
        script = self._script
        runtime, regions, boundary, step = script.runtime, script.regions, script.boundary, script.step
        with boundary.aside():
            found = facts.gather(
                step=step,
                world_size=runtime.world_size,
                loaders=script.passes.loaders,
                models=[model for model in regions.models if regions.trained(model)],
                optimizers=regions.optimizers,
                schedulers=[one for ref in regions.schedulers if (one := ref()) is not None],
                scalers=regions.scalers,
                adapters=tuple(script.places.applied),
                sidecar_bytes=self.sidecar_bytes,
                journal_budget=runtime.budget,
                tape_bytes=script.tape.bytes / step if step else 0.0,
                forward_seconds=boundary.outside_seconds / step if step else 0.0,
                large=tuple(Large(path, size) for path, size in script.variables.lost.items()),
                threads=facts.threads(self._threads),
                closures=tuple(self._closures),
                weights=script.digest_of_weights() if step == 1 and not script.sharded else "",
                others=tuple(self._others()),
            )
            runtime.send(Protection(found))
            if os.environ.get("TORCHPASS_STRICT") == "1" and lint.unprotected(lint.judge(found)):
                runtime.wait_for_end()

    def _others(self) -> list[Finding]:
        """What the rules of `core.lint` do not know."""
        script = self._script
        others = list(self._findings.values())
        if any(frame.f_code.co_name in _COMPREHENSIONS for frame in walk.user_frames(sys._getframe())):
            what = "steps run inside a comprehension, whose half-built result nobody sees"
            advice = "exact if it collects numbers; collect tensors in a variable"
            others.append(Finding("note", "comprehension", what, "", advice))
        others += [
            Finding("unprotected", reason, f"{reason}, which cannot be made anew elsewhere", "", lint.TWO_LINES)
            for reason in (script.passes.indescribable, script.regions.indescribable)
            if reason
        ]
        if script.variables.unseen:
            what = f"the script's variables are too many to be looked at, from `{script.variables.unseen}` on"
            others.append(Finding("unprotected", "variables", what, "", f"keep less in variables, or {lint.TWO_LINES}"))
        fix = f"take less out, or {lint.TWO_LINES}"
        others += [
            Finding("unprotected", f"size {at}", f"{lint.size(size)} are taken out of a tensor", at, fix)
            for at, size in script.boundary.too_large.items()
        ]
        others += [
            Finding("unprotected", f"unmovable {at}", f"what cannot be moved is read: {why}", at, fix)
            for at, why in script.boundary.unmovable.items()
        ]
        return others
