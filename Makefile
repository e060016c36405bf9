# Each target does its own set-up in .venv; it takes minutes the first time and nothing after.
PYTHON ?= python3
export PYTHON

.PHONY: demo test test-slurm-matrix soak lint setup install-slurm clean

demo: setup ## train twice on a small Slurm cluster, once with a node powered off, and compare every bit
	@.venv/bin/python -m examples.demo

test: lint ## all tests but the long random ones
	.venv/bin/python -m pytest -n 2 -m "not soak and not slurm_matrix"

test-slurm-matrix: setup ## what depends on Slurm's version, on 24.11 and 26.05, too (makes their roots: minutes, 2 GB)
	TORCHPASS_REQUIRE_BED=1 .venv/bin/python -m pytest -m slurm_matrix

soak: setup ## hundreds of random kills
	.venv/bin/python -m pytest -m soak

lint: setup ## ruff and mypy --strict
	.venv/bin/ruff check .
	.venv/bin/mypy

setup: ## the virtual environment and the C++ part
	@tools/setup.sh

install-slurm: ## the Slurm plugin and its scripts, on this host; PLUGSTACK=/etc/slurm/plugstack.conf adds its line
	$(MAKE) -C slurm_plugin install

clean: ## everything that was made here
	rm -rf .venv build dist *.egg-info tpwrap/engine/_native*.so .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
