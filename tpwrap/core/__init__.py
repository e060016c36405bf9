"""Decisions as pure functions and data: nothing here does I/O, and time is always an argument."""
