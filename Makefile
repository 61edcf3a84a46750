# swansong: every command a developer or CI needs. Each is enough on a fresh machine with Python 3.11.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready
ARGS   ?=
SEEDS  ?= 20000
FAULTS ?= 200
RANKS  ?= 2-8
# Ranks and test workers share the cores; one thread per library keeps them from fighting.
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup check test demo bench simulate campaign mutate clean

help: ## Show this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-9s %s\n", $$1, $$2}'

setup: $(STAMP) ## Make .venv with the pinned versions of everything, the frameworks included

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "swansong: $(PYTHON) not found; set PYTHON=/path/to/python3.11"; exit 1; }
	@echo "Making $(VENV): about 4 GB, a few minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -qq --constraint constraints.txt --editable '.[mindspore,torch,dev]'
	@touch $@

check: setup ## Format, lint, types, import contracts, sizes
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports --cache-dir .cache/import_linter > .cache/lint-imports.log 2>&1 || { cat .cache/lint-imports.log; exit 1; }
	$(BIN)/python tools/size_gate.py

test: check ## The checks, then every test
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

demo: setup ## LeNet5 on handwritten digits: saved by policy, stopped, resumed to the same bits; then a rank is killed
	$(BIN)/python examples/demo.py
	$(BIN)/python examples/kill_demo.py $(ARGS)

bench: setup ## Everything against its bars: make bench ARGS=--quick takes two minutes
	$(BIN)/python -m benchmarks $(ARGS)

simulate: setup ## Run the protocol in simulation: make simulate SEEDS=100000 RANKS=2-64
	$(BIN)/python tools/simulate.py --seeds $(SEEDS) --ranks $(RANKS) $(ARGS)

campaign: setup ## Random faults at random moments of a PyTorch job: make campaign FAULTS=200
	$(BIN)/python tools/torch_campaign.py --faults $(FAULTS) $(ARGS)

mutate: setup ## Remove each row, guard and deadline of the protocol in turn: does a test notice?
	$(BIN)/python tools/mutate_protocol.py --jobs 2 --results .cache/mutants.json $(ARGS)

clean: ## Remove what the commands above made
	rm -rf $(VENV) .cache dist build MNIST_Data checkpoint demo_out
	find src tests examples benchmarks tools -name __pycache__ -type d -prune -exec rm -rf {} +
