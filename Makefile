# make fit    train SemiFL on the bundled handwritten digits (CONFIG=..., ARGS="--trainer.max_rounds 5" change it)
# make check  lint, type-check and run the quick tests: for daily work
# make test   lint, type-check and run every test but the slow ones
# make slow   run the slow tests: the commands of all pages, the emulated GPU, an installed wheel, processes of Flower, wandb and MLflow
# make docs   build the documentation site into site/
# make gpu    on a machine with CUDA: its benchmark, 8 minutes, which resumes where it stopped (GPU=folder), and its tests;
#             with PYTHON=python3 it installs nothing and takes the packages that this Python has
# make papers the papers' next tables on a machine with CUDA, for MINUTES=9; what resumes them is kept in PAPERS=folder, in
#             files of 15 MiB, and read from there
# make evidence  compare methods on Fashion-MNIST and CIFAR-10 with few labels: hours on two cores, resumes where it stopped
# make deploy-demo  a real federation on this machine: a server and three nodes over Flower, with TLS; about a minute
# The first call makes .venv with the versions in constraints.txt. TORCH=cpu takes the CPU build of PyTorch (1.4 GB in place of 6), which
# Linux without an NVIDIA driver does by itself; TORCH=gpu never does.

PYTHON ?= python3
VENV ?= .venv
CONFIG ?= configs/semifl_digits.yaml
ARGS ?=
WORKERS ?= 2
SUITES ?= fashionmnist cifar10_500
DATA ?= data
GPU ?= runs/gpu
PAPERS ?= runs/papers_state
MINUTES ?= 9
TORCH ?= $(if $(filter Linux,$(shell uname -s)),$(if $(wildcard /proc/driver/nvidia /dev/nvidiactl),gpu,cpu),gpu)
# Tests of single functions and values; those that train whole federations take longer.
QUICK := tests/test_package.py $(wildcard $(addprefix tests/,functional models data storage system test_sampling.py \
	test_schedules.py test_state.py test_metrics.py comparison/test_plan.py))

BIN := $(VENV)/bin
ifeq ($(origin PYTHON),command line)
GPU_PYTHON := $(PYTHON)
GPU_NEEDS :=
else
GPU_PYTHON := $(BIN)/python
GPU_NEEDS := $(VENV)/.installed-test
endif
# Where bytecode is stored, a worker starts in two thirds of the time: it need not compile the tests and the package.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -q
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# uv knows where PyTorch's builds for CPUs are; behind a mirror that has none, pip installs the usual ones.
CPU_TORCH := $(INSTALL) uv && UV_HTTP_RETRIES=0 $(BIN)/uv pip install --quiet --python $(BIN)/python --torch-backend cpu \
	--constraint constraints.txt torch torchvision 2> $(VENV)/cpu_torch.log
NO_CPU_TORCH := No CPU build of PyTorch can be reached ($(VENV)/cpu_torch.log): installing the one with CUDA, about 6 GB.

.PHONY: deploy-demo fit check test slow gpu papers evidence lint docs clean help
.DEFAULT_GOAL := help

help:
	@sed -n '1,/^PYTHON/s/^# //p' Makefile

fit: $(VENV)/.installed
	$(BIN)/lightning-fedssl fit --config $(CONFIG) $(ARGS)

deploy-demo: $(VENV)/.installed
	@$(BIN)/python -c 'import flwr' 2>/dev/null || $(INSTALL) --editable '.[flower]'
	$(BIN)/lightning-fedssl deploy demo runs/deploy_demo/$$(date +%Y%m%d-%H%M%S)

papers: | $(GPU_NEEDS)
	@mkdir -p runs/papers $(PAPERS)
	@if ls $(PAPERS)/part.* > /dev/null 2>&1; then cat $(PAPERS)/part.* | tar x; fi
	PYTHONPATH=. $(GPU_PYTHON) benchmarks/papers.py next --root $(DATA) --accelerator cuda --minutes $(MINUTES) $(ARGS)
	rm -f $(PAPERS)/part.*
	tar c runs/papers benchmarks/results/next_tables.csv benchmarks/results/curves.csv | split -b 15M - $(PAPERS)/part.

evidence: $(VENV)/.installed
	for suite in $(SUITES); do \
	  $(BIN)/lightning-fedssl compare $$suite.yaml --jobs $(WORKERS) --data.root $(DATA) --data.download true $(ARGS) || exit; \
	done

check: lint
	$(PYTEST) $(QUICK)

test: lint
	$(PYTEST) -m "not slow"

slow: $(VENV)/.installed-test
	@$(BIN)/python -c 'import wandb, mlflow' 2>/dev/null || $(INSTALL) --editable '.[wandb,mlflow]'
	$(PYTEST) -m slow
	$(PYTEST) tests/callbacks/test_boards.py

# A measurement that fails keeps neither the others nor the tests from running.
gpu: | $(GPU_NEEDS)
	@mkdir -p $(GPU)
	-PYTHONPATH=. $(GPU_PYTHON) benchmarks/gpu.py --output $(GPU)
	PYTHONPATH=. timeout 590 $(GPU_PYTHON) -m pytest -q -m gpu tests > $(GPU)/tests.txt; tail -n 5 $(GPU)/tests.txt

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/weight.py --check

docs: $(VENV)/.installed-test
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "The site is in site/: open site/index.html, or serve it with $(BIN)/python -m http.server -d site"

clean:
	rm -rf $(VENV) site build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/.installed: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "error: there is no $(PYTHON); install Python 3.10 or newer, or call: make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "error: $$($(PYTHON) --version) is too old; call make PYTHON=python3.11, or any Python from 3.10 on"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "error: $(PYTHON) cannot make virtual environments; install its venv package (Debian, Ubuntu: apt install python3-venv)"; exit 1; }
	@echo "Installing PyTorch, Lightning and lightning-fedssl into $(VENV): once, some minutes."
	@$(PYTHON) -m venv $(VENV)
	@if [ "$(TORCH)" = cpu ]; then $(CPU_TORCH) || echo "$(NO_CPU_TORCH)"; fi
	@$(INSTALL) --editable .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@echo "Installing the test tools."
	@$(INSTALL) --editable '.[test]'
	@touch $@
