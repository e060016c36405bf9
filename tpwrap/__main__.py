"""`python -m tpwrap` is `tpwrap`."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # -m puts the current directory first: a user's logging.py beside train.py is not for us.
    if sys.path and sys.path[0] == os.getcwd():
        del sys.path[0]

    from tpwrap.cli import main

    main()
