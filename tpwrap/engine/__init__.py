"""Inside the worker: communicators that keep their identity, steps, state and its movement.

`_native` is the C++ part (sources in `native/`); `_native.pyi` says what it offers.
"""
