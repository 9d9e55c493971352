# Two commands: `make demo` runs the main job on the CPU, `make test` passes the tests. Each sets itself up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test check setup clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 10) <= v <= (3, 12) else f"expected Python 3.10 to 3.12, found {v[0]}.{v[1]}: make PYTHON=python3.11 setup")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[fast,test]'
	$(BIN)/pip check
	touch $@

demo: $(STAMP)
	$(BIN)/python launch.py data sample
	$(BIN)/python launch.py --recipe qwen25_tiny

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest tests/unit

test: check
	$(BIN)/pytest --ignore=tests/unit

clean:
	rm -rf $(VENV) runs corpora
