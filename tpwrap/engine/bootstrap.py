"""The first thing in a worker: get warm, wait for a rank, then let the user's script start.

Three entries. `preload` may run in a process that is forked later: it imports and warms up, and starts no thread.
`run` is for a forked worker: it runs the script and ends the process. `enter` is for a worker that was executed (any
command that ends up in Python): it returns when the script may start, and hooks the end of the process.
"""

from __future__ import annotations

import atexit
import importlib
import os
import queue
import re
import runpy
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

_loaded = False


def preload() -> None:
    """Import torch and what training imports lazily, and do one toy step (the first one costs about a second)."""
    global _loaded
    if _loaded:
        return
    import numpy  # noqa: F401
    import torch
    import torch._dynamo  # optimizers import it at their first step
    import torch.utils.data
    from torch.nn.parallel import DistributedDataParallel  # noqa: F401

    import tpwrap.engine.runtime
    import tpwrap.engine.script.script
    import tpwrap.engine.session  # noqa: F401

    state = torch.get_rng_state()
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    torch.nn.functional.cross_entropy(model(torch.ones(2, 4)), torch.zeros(2, dtype=torch.long)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    torch.set_rng_state(state)
    _loaded = True


def load(modules: Iterable[str]) -> None:
    """Import what the script will import. The random state of torch stays what it was."""
    import torch

    state = torch.get_rng_state()
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception:  # a module that only works inside the script is no reason to be less warm
            continue
    torch.set_rng_state(state)


def _become_ranked(two_lines: bool) -> Any:
    """Connect, report warm, wait for `Assign`; returns the Runtime. two_lines: the script is known to use our API."""
    from tpwrap.control.messages import Assign, CoordinatorToWorker, Warm, WarmReady
    from tpwrap.core.timeouts import Timeouts

    environ = os.environ
    path, worker = environ.pop("TORCHPASS_SOCKET"), environ["TORCHPASS_WORKER"]
    from tpwrap.engine.link import Link

    link = Link(path, worker)
    preload()
    from tpwrap.engine.runtime import Runtime
    from tpwrap.engine.transfer import StateServer

    key = bytes.fromhex(Path(environ["TORCHPASS_KEY_FILE"]).read_text().strip())
    timeouts = Timeouts.derive(float(environ["TORCHPASS_FAILURE_TIMEOUT"]))
    server = StateServer(environ.get("TORCHPASS_HOST", "127.0.0.1"), key)
    inbox: queue.SimpleQueue[CoordinatorToWorker] = queue.SimpleQueue()
    handler: list[Callable[[CoordinatorToWorker], None]] = [inbox.put]
    handling = threading.Lock()

    def dispatch(message: CoordinatorToWorker) -> None:
        with handling:
            handler[0](message)

    link.start(dispatch)
    link.send(WarmReady(os.getpid(), server.address))
    while True:
        message = inbox.get()
        if isinstance(message, Warm):
            load(message.modules)
        elif isinstance(message, Assign):
            break
    environ.update(message.env)
    # As under torchrun: init_process_group("env://") takes part in the job's store instead of starting one.
    environ.setdefault("TORCHELASTIC_USE_AGENT_STORE", "True")
    environ.setdefault("TORCHELASTIC_RESTART_COUNT", "0")
    from tpwrap.engine.script import rehearsing

    rehearsing.prepare(message.rank, two_lines)
    runtime = Runtime(link, server, key, timeouts, message)
    if not two_lines:
        from tpwrap.engine.script.script import Script

        runtime.script = Script(runtime)
    if message.plan is not None and not runtime.live:
        from tpwrap.engine import join

        join.prepare(runtime, message.plan)
    with handling:  # nothing may overtake what has arrived meanwhile
        while not inbox.empty():
            runtime.handle(inbox.get())
        handler[0] = runtime.handle
    return runtime


def run(argv: list[str]) -> NoReturn:
    """Run `python *argv` in this (forked) process: ['script.py', …] or ['-m', 'package.module', …]. Never returns."""
    code = 70
    try:
        argv = [a for a in argv if a != "-u"] if argv[:1] == ["-u"] else argv
        runtime = _become_ranked(_mentions_us(argv))
        code = _run_script(runtime, argv)
    except BaseException:
        os.write(2, traceback.format_exc().encode())  # sys.stderr may be muted
    _leave(code)


def _mentions_us(argv: list[str]) -> bool:
    """Whether the script imports tpwrap itself. (If only a module of it does, that is noticed when it calls us.)"""
    try:
        return re.search(r"^\s*(import|from) tpwrap\b", Path(argv[0]).read_text(errors="replace"), re.M) is not None
    except OSError:
        return False


def _run_script(runtime: Any, argv: list[str]) -> int:
    try:
        if argv[0] == "-m":
            sys.argv = argv[1:]
            sys.path[0:0] = [os.getcwd()]
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(argv)
            sys.path[0:0] = [str(Path(argv[0]).resolve().parent)]
            runpy.run_path(argv[0], run_name="__main__")
        threading._shutdown()  # type: ignore[attr-defined]  # wait for the script's own threads, as Python does
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if code != 0:
            if not isinstance(end.code, int):
                print(end.code, file=sys.stderr)
            _report(runtime, _exit_in_words(end.code), "", code)
            return code
    except BaseException as error:
        _report(runtime, _headline(error), _of_the_script(error), 1)
        return 1
    sys.stdout.flush()
    if runtime.script is not None:
        runtime.script.ended()
    runtime.finish(runtime.step)
    return 0


def _exit_in_words(status: Any) -> str:
    """What sys.exit was called with."""
    if isinstance(status, int):
        return f"the script asked for exit code {status}"
    lines = str(status).strip().splitlines()
    return f"the script exited: {lines[0]}" if lines else "the script asked for exit code 1"


def _headline(error: BaseException) -> str:
    """One line that names it."""
    try:
        text = str(error)
    except Exception:  # of the script, too
        text = "(its message cannot be shown)"
    return f"{type(error).__name__}: {text}".splitlines()[0].removesuffix(": ")


def _of_the_script(error: BaseException) -> str:
    """The traceback without the frames that lead from us into the script."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__") in (__name__, "runpy"):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def _report(runtime: Any, error: str, text: str, code: int) -> None:
    from tpwrap.control.messages import Failed

    runtime.send(Failed(runtime.step, _sendable(error)[:2000], _sendable(text)[-20000:], code))


def _sendable(text: str) -> str:
    """Names of files may hold bytes that are no text, and error messages hold names of files."""
    return text.encode(errors="backslashreplace").decode()


def _leave(code: int) -> NoReturn:
    """End without finalizing the interpreter: its C++ threads could then run into a half-dead one."""
    try:
        atexit._run_exitfuncs()
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                pass
        os._exit(code)


def enter() -> None:
    """For an executed worker: return when the script may start."""
    runtime = _become_ranked(two_lines=False)
    outcome: dict[str, Any] = {"code": 0, "words": "", "reported": False}
    previous = sys.excepthook
    real_exit = sys.exit

    def failed(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _report(runtime, _headline(error), "".join(traceback.format_exception(kind, error, trace)), 1)
        outcome.update(code=1, reported=True)
        previous(kind, error, trace)

    def leave(status: Any = None) -> NoReturn:
        outcome["code"] = status if isinstance(status, int) else 0 if status is None else 1
        outcome["words"] = _exit_in_words(status)
        real_exit(status)

    def at_end() -> None:
        if outcome["code"] == 0:
            sys.stdout.flush()
            if runtime.script is not None:
                runtime.script.ended()
            runtime.finish(runtime.step)
        elif not outcome["reported"]:
            _report(runtime, outcome["words"], "", outcome["code"])

    sys.excepthook = failed
    sys.exit = leave
    atexit.register(at_end)
