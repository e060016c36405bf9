"""`python torchpass.py MODULE ARGUMENT…` calls main() of one of our modules (tpwrap.launch.interpreter)."""

import importlib
import importlib.util
import os
import sys

# The directory of this file: not a place to import from. (With -P or PYTHONSAFEPATH Python does not add it.)
_here = os.path.dirname(os.path.abspath(__file__))
if sys.path and os.path.abspath(sys.path[0]) == _here:
    del sys.path[0]
if importlib.util.find_spec("tpwrap") is None:
    # Not installed: tpwrap runs from a checkout.
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(_here))))
sys.exit(importlib.import_module(sys.argv[1]).main(sys.argv[2:]))
