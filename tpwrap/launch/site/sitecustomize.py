"""Found by Python at start-up in a worker that was executed: lets the engine in, then makes room.

Python imports one `sitecustomize`, the first on sys.path, which is this one; the one that it hides (of the
user or the distribution) is run as if this were not here.
"""

import os
import sys


def _run_hidden() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    import importlib.machinery
    import importlib.util

    spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _enter() -> None:
    if "TORCHPASS_SOCKET" not in os.environ:
        return
    try:
        import tpwrap.engine.bootstrap as bootstrap
    except ImportError as e:
        print(
            f"torchpass: {sys.executable} cannot import the engine ({e}); install tpwrap in its environment",
            file=sys.stderr,
            flush=True,
        )
        os._exit(78)
    bootstrap.enter()


_run_hidden()
_enter()
