# Two commands do everything, each from nothing:  make demo   make test
PYTHON ?= python3
SEED ?= 0
BIN := .venv/bin
READY := .venv/ready
# What is imported is compiled once, and only that.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test docs test-browser soak parity bench bench-setup clean
.DELETE_ON_ERROR:

setup: $(READY)

# Made once, and anew when what it is made from changes.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "moatlab needs Python 3.11 or newer; name one with: make PYTHON=python3.11"; exit 1; }
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

# The documentation as a site that works offline: build/site/index.html
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "the site is build/site/index.html"

# The report and the site in headless Chromium, which must be there (Debian: apt install chromium). `make test` does this where it is.
test-browser: setup
	MOAT_BROWSER=required $(BIN)/pytest tests/browser

# Faults in great numbers, written to docs/results/reliability.json; about an hour on two cores.
soak: setup
	PYTHONPATH=tests $(BIN)/python -m faults.soak

# Verdicts against the reference AutoAttack, written to docs/results/parity.json; about an hour on two cores.
parity: setup
	$(BIN)/python benchmarks/parity.py

# The libraries that the benchmarks compare with; one that can't be had is left out by them.
bench-setup: setup
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --requirement benchmarks/peers.txt || \
	for peer in $$(grep -v '^#' benchmarks/peers.txt); do \
	  $(BIN)/pip install --quiet --disable-pip-version-check --no-deps $$peer || echo "$$peer can't be had here"; done

# Everything in docs/results/speed.json, side by side with the peers; about an hour on two cores.
bench: bench-setup demo
	$(BIN)/moat bench && $(BIN)/python benchmarks/sides.py runs/bench/bench.json
	$(BIN)/python benchmarks/training.py
	$(BIN)/python benchmarks/training.py --keep-for-all --part paper
	$(BIN)/python benchmarks/scaling.py
	$(BIN)/python benchmarks/evaluation.py

clean:
	rm -rf .venv build dist
