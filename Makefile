# Two commands are enough on a fresh machine: `make demo` and `make test`.

PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all lint types format clean check-system

help:
	@echo "make demo      train a small model with a swarm of seven daemons on this computer"
	@echo "make test      lint, types, unit and simulation tests, the main tests on real swarms"
	@echo "make test-all  the same and the long matrix of faults"
	@echo "make lint      ruff, ruff format, codespell      make types   mypy"
	@echo "make format    rewrite the sources as ruff wants them"
	@echo "make install   make $(VENV) (the others do it when needed)"
	@echo "make clean     remove $(VENV), caches and build outputs"

install: $(STAMP)

# torch comes first, in a step of its own: otherwise the resolver may pick another build of it.
$(STAMP): pyproject.toml constraints.txt
	@$(MAKE) --no-print-directory check-system
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	@touch $@

# libp2p needs fastecdsa, which is compiled against GMP on every machine.
check-system:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "shoal needs Python 3.11 ($(PYTHON) was not found)."; \
	  echo "  Debian, Ubuntu:  sudo apt-get install python3.11 python3.11-venv python3.11-dev"; \
	  echo "  another one:     make install PYTHON=/path/of/python"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, os, sysconfig; \
	  assert os.path.exists(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null || { \
	  echo "$(PYTHON) lacks its venv module or its headers."; \
	  echo "  Debian, Ubuntu:  sudo apt-get install python3.11-venv python3.11-dev"; exit 1; }
	@{ command -v gcc && echo '#include <gmp.h>' | gcc -E -; } >/dev/null 2>&1 || { \
	  echo "shoal needs a C compiler and the GMP headers (gcc or gmp.h was not found)."; \
	  echo "  Debian, Ubuntu:  sudo apt-get install gcc libgmp-dev"; \
	  echo "  Fedora:          sudo dnf install gcc gmp-devel"; exit 1; }

demo: install
	$(BIN)/shoal demo

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell

types: install
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: lint types
	$(BIN)/python -m pytest -m "not slow"

test-all: lint types
	$(BIN)/python -m pytest

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
