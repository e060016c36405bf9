"""`python -m tpwrap` is `tpwrap`."""

from __future__ import annotations

from tpwrap.cli import main

if __name__ == "__main__":
    main()
