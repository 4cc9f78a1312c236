# From a fresh clone:  make demo   make test
PYTHON ?= python3
SEED ?= 0
BIN := .venv/bin
READY := .venv/ready
# Cache bytecode, of imported modules only (pip runs with --no-compile).
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test docs test-browser test-trackers soak parity bench bench-setup clean
.DELETE_ON_ERROR:

setup: $(READY)

# Made again when pyproject.toml or constraints.txt changes.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "moatlab needs Python 3.11 or newer; choose one with: make PYTHON=python3.11"; exit 1; }
	@echo "setting up .venv (PyTorch is large; this takes a minute or two)"
	@$(PYTHON) -m venv --clear .venv
	@$(BIN)/pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $(READY)

demo: setup
	@$(BIN)/moat demo --seed $(SEED)

test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest --ignore tests/browser
	$(BIN)/pytest tests/browser

# Build the documentation as an offline site: build/site/index.html
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "the site is build/site/index.html"

# Test the report and the site in headless Chromium (Debian: apt install chromium). `make test` skips this without Chromium.
test-browser: setup
	MOAT_BROWSER=required $(BIN)/pytest tests/browser

# Test MLflow and Weights & Biases, without a network, in an environment of their own: build/trackers.
test-trackers: build/trackers/ready
	build/trackers/bin/pytest tests/training/test_tracking_services.py tests/training/test_trackers.py

build/trackers/ready: pyproject.toml constraints-trackers.txt
	@$(PYTHON) -m venv --clear build/trackers
	@build/trackers/bin/pip install --quiet --no-compile --disable-pip-version-check --constraint constraints-trackers.txt \
	  --editable '.[tensorboard,wandb,mlflow]' pytest pytest-xdist hypothesis
	@touch build/trackers/ready

# Many injected faults; writes docs/results/reliability.json; about an hour on two cores.
soak: setup
	PYTHONPATH=tests $(BIN)/python -m faults.soak

# Compare verdicts with the reference AutoAttack; writes docs/results/parity.json; about an hour on two cores.
parity: setup
	$(BIN)/python benchmarks/parity.py

# Install the libraries that the benchmarks compare with; unavailable ones are skipped.
bench-setup: setup
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --requirement benchmarks/peers.txt || \
	for peer in $$(grep -v '^#' benchmarks/peers.txt); do \
	  $(BIN)/pip install --quiet --disable-pip-version-check --no-deps $$peer || echo "$$peer is not available"; done

# Measure everything in docs/results/speed.json; about an hour on two cores.
bench: bench-setup demo
	$(BIN)/moat bench && $(BIN)/python benchmarks/sides.py runs/bench/bench.json
	$(BIN)/python benchmarks/training.py
	$(BIN)/python benchmarks/training.py --keep-for-all --part paper
	$(BIN)/python benchmarks/scaling.py
	$(BIN)/python benchmarks/evaluation.py

clean:
	rm -rf .venv build dist
