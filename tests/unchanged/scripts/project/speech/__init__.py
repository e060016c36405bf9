"""Started as `python -m speech.train`."""
