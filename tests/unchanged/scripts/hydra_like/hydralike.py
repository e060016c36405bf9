"""A small home-made entry: a decorator that builds a configuration from a default and `key=value` arguments."""

import ast
import functools
import sys
from types import SimpleNamespace


def main(**defaults):
    def decorate(function):
        @functools.wraps(function)
        def entry():
            values = dict(defaults)
            for override in sys.argv[1:]:
                key, _, text = override.partition("=")
                if key not in values:
                    raise SystemExit(f"Could not override '{key}'")
                values[key] = text if isinstance(values[key], str) else ast.literal_eval(text)
            return function(SimpleNamespace(**values))

        return entry

    return decorate


def instantiate(target, *args, **kwargs):
    module, _, name = target.rpartition(".")
    return getattr(__import__(module, fromlist=[name]), name)(*args, **kwargs)
