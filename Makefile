# What a person types; .ci/run calls the same targets. Everything runs in .venv, made from requirements.lock.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# The interpreter that has FBGEMM and TorchRec for benchmarks; without it they do not take part.
PEERS := .venv-peers
PEERS_PYTHON ?= $(PEERS)/bin/python
CONFIG ?= examples/adult/satrap.yaml

.PHONY: run test check format test-slow test-fault test-bounds bench bench-peers lock clean
.DEFAULT_GOAL := run

run: $(READY)
	@$(BIN)/satrap run $(CONFIG)

test: check
	$(BIN)/python -m pytest

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow --timeout 1800

test-fault: $(READY)
	$(BIN)/python -m pytest -m fault --timeout 600

# The kernels against their slow model with every access checked; compiled apart, so that neither cache sees the other's code.
test-bounds: $(READY)
	NUMBA_BOUNDSCHECK=1 NUMBA_CACHE_DIR=build/numba-bounds $(BIN)/python -m pytest tests/training/embedding --timeout 600 \
	  -k 'table_reference or optimizers or precision or dedup'

bench: $(READY)
	PEERS_PYTHON=$(PEERS_PYTHON) $(BIN)/python -m benchmarks
	$(BIN)/python -m benchmarks.transport
	$(BIN)/python -m benchmarks.quality examples/adult/satrap.yaml --set training.epochs=1

# torchrec asks for the CUDA build of FBGEMM, hence --no-deps; these versions belong together, which nothing in their metadata says.
bench-peers: $(PEERS)/.ready

$(PEERS)/.ready: benchmarks/peers.txt
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -r benchmarks/peers.txt
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps torchrec==1.8.0
	touch $@

# The lock names every package with its version; pip adds to it only what the PyTorch build it finds brings along (CUDA's libraries).
# This project itself comes without dependencies of its own: what the lock lacks pip check finds.
$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "satrap needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; use make PYTHON=python3.11 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	$(BIN)/python -m pip check
	touch $@

lock:
	rm -rf build/lock
	$(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet --disable-pip-version-check --upgrade setuptools
	build/lock/bin/python -m pip install --quiet --disable-pip-version-check '.[dev]'
	{ echo '# Every package of the environment, pinned; made on Python 3.11 by `make lock`.'; \
	  build/lock/bin/python -m pip freeze --all --exclude satrap --exclude pip | sed 's/+cpu$$//' | LC_ALL=C sort -f; } > requirements.lock
	rm -rf build/lock

clean:
	rm -rf $(VENV) $(PEERS) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find . -name '*.nb[ic]' -delete
