"""Inside the worker: communicators that keep their identity, steps, state and its movement."""
