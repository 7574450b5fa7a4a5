# `make run` and `make test` work on a fresh machine: each makes .venv and installs what it needs first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Passive waiting keeps a step's time steady when another process is busy on the same cores.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: run test fuzz test-slow test-flower lint bench bench-peers docs notebooks wheel clean

$(BIN)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "fedbayes needs Python 3.11 or newer; set PYTHON=python3.11 (or newer)")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

run: $(BIN)/.installed
	$(BIN)/fedbayes run quickstart

test: $(BIN)/.installed lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile -m "not flower and not slow"

# Tables that take minutes: methods by layers and sweeps in whole, large real files, all of scikit-learn's checks.
test-slow: $(BIN)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto -m slow

# Damaged experiment files, data files and run folders by the thousand; FUZZ="--folders 100 --first 2000" chooses.
fuzz: $(BIN)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz/long.py $(FUZZ)

$(BIN)/.installed-flower: $(BIN)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[flower]"
	@touch $@

# Flower's own processes on this machine: a SuperLink and SuperNodes with TLS and keys, killed and restarted; and Ray.
test-flower: $(BIN)/.installed-flower
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/flower

bench: $(BIN)/.installed
	$(BIN)/python benchmarks/cpu.py

# FedAvg here and in other libraries, each in an environment of its own under .peers; what cannot be installed says why.
# PEERS="--only fedjax --turns 1" chooses.
bench-peers: $(BIN)/.installed
	$(BIN)/python benchmarks/peers.py $(PEERS)

$(BIN)/.installed-docs: $(BIN)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	@touch $@

docs: $(BIN)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The built wheel in a clean environment with the lowest and with the newest versions; downloads PyTorch twice.
wheel:
	.ci/wheel lowest
	.ci/wheel newest

# Some pages of the docs as notebooks: the same text, the same code.
notebooks:
	$(PYTHON) docs/notebooks.py notebooks

lint: $(BIN)/.installed
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) .peers build dist site notebooks .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
