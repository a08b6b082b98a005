# Two commands need nothing but Python 3.11 or newer with venv: `make demo` and `make test`.
# Each makes .venv and installs into it what it needs; a second call installs nothing, unless
# pyproject.toml has changed. ARGS is passed on: make test ARGS="-k payment".

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
CODE := pidurable extensions examples benchmarks

.PHONY: help demo test check verify verify-long bench clean
.NOTPARALLEL:

help:
	@echo "make demo   an agent repairs a project, is killed three times, and finishes"
	@echo "make test   the test suite"
	@echo "make check  lint, format, types"
	@echo "make verify the goals of reliability: crashes, faults, two holders, commands, moves"
	@echo "make verify-long  the same with the figures from before a release (hours)"
	@echo "make bench  the benchmarks; the last line of each is its figure"
	@echo "make clean  remove .venv and caches"

# A stamp below .venv stands for "this is installed", so that an interrupted step is made again.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$(PYTHON) is older than Python 3.11; name a newer one: make PYTHON=python3.12 ..." >&2; \
		exit 1; }
	@$(PYTHON) -m venv --clear $(VENV) || { \
		echo "making $(VENV) failed; on Debian and Ubuntu: apt-get install python3-venv" >&2; \
		exit 1; }
	@touch $@

$(VENV)/.demo: $(VENV)/.made pyproject.toml
	@echo "installing into $(VENV) what the demo needs"
	@$(PIP) --editable '.[demo]'
	@touch $@

$(VENV)/.test: $(VENV)/.made pyproject.toml
	@echo "installing into $(VENV) what the tests need"
	@$(PIP) --editable '.[all,test]'
	@touch $@

$(VENV)/.dev: $(VENV)/.made pyproject.toml
	@echo "installing into $(VENV) what the checks need"
	@$(PIP) --editable '.[all,test,dev]'
	@touch $@

demo: $(VENV)/.demo
	$(BIN)/python -m pidurable.cli demo $(ARGS)

# pytest rewrites the assertions of every module, in every process, unless it may keep the result: a
# third of the time of the whole suite.
test: export PYTHONDONTWRITEBYTECODE =
test: $(VENV)/.test
	$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	find $(CODE) -name '*.py' -print0 | xargs -0 -n 30 -P 2 \
		$(BIN)/flake8-async --disable ASYNC9,ASYNC114,ASYNC124,ASYNC128
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python

verify: $(VENV)/.test
	$(BIN)/python tests/verify/goals.py $(ARGS)

verify-long: $(VENV)/.test
	$(BIN)/python tests/verify/goals.py --long $(ARGS)

bench: $(VENV)/.test
	@set -e; for each in benchmarks/[a-z]*.py; do echo "== $$each"; $(BIN)/python $$each $(ARGS); done

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build
