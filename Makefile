# Each target does its own set-up in .venv; it takes minutes the first time and nothing after.
PYTHON ?= python3
export PYTHON

.PHONY: demo test soak lint setup clean

demo: setup ## train twice, once with a killed node, and compare every bit
	@.venv/bin/python -m examples.demo

test: lint ## all tests but the long random ones
	.venv/bin/python -m pytest -n 2 -m "not soak"

soak: setup ## hundreds of random kills
	.venv/bin/python -m pytest -m soak

lint: setup ## ruff and mypy --strict
	.venv/bin/ruff check .
	.venv/bin/mypy

setup: ## the virtual environment and the C++ part
	@tools/setup.sh

clean: ## everything that was made here
	rm -rf .venv build dist *.egg-info tpwrap/engine/_native*.so .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
