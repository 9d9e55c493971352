# `make demo` runs the main job on the CPU, `make check` takes half a minute, `make test` runs every test. Each installs
# what it needs first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Some container images set it. Then every process compiles what it imports: 30 s of a CPU each time for NeMo.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo story test check setup clean style types light every format imports

setup: $(STAMP)

# constraints.txt is the whole set, so pip resolves nothing: it installs the list and then checks that it is complete.
# torch first and on its own: with CUDA it brings packages that the list does not name.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 10) <= v <= (3, 12) else f"expected Python 3.10 to 3.12, found {v[0]}.{v[1]}: make PYTHON=python3.11 setup")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt torch
	$(BIN)/pip install --quiet --no-compile --no-deps --requirement constraints.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	$(BIN)/pip check
	touch $@

LAUNCH := $(BIN)/python launch.py
REPORT := runs/demo-replay/report.html

# base on prose -> Hugging Face -> continued on code with and without replay -> export, passport, report
demo: $(REPORT)
	@$(LAUNCH) generate models/demo-code "def __init__(self" 2>/dev/null
	@echo "report:     $(REPORT)   (open it in a browser)"
	@echo "model:      models/demo-code   (Hugging Face)"
	@echo "checkpoint: $$(ls -d runs/demo-replay/checkpoints/step-* | tail -1)"
	@echo "curve:      $(BIN)/tensorboard --logdir runs"

$(REPORT): $(STAMP)
	rm -rf runs/demo-base runs/demo-replay runs/demo-no-replay models/qwen25-tiny models/demo-code
	$(LAUNCH) data sample
	$(LAUNCH) --recipe qwen25_tiny --name demo-base
	$(LAUNCH) convert export runs/demo-base models/qwen25-tiny
	$(LAUNCH) --recipe qwen25_tiny_cpt --name demo-no-replay data.replay_share=0.0
	$(LAUNCH) --recipe qwen25_tiny_cpt --name demo-replay
	$(LAUNCH) convert export runs/demo-replay models/demo-code
	$(LAUNCH) passport demo-replay
	$(LAUNCH) report demo-replay --against demo-no-replay

STORY := runs/story/report.html
STORY_RUN := qwen25_tiny_cpt --profile wsd --tokens 409600 optim.config.lr=1e-3

# plan -> pilot -> a run with a forgetting budget and a final stage -> its forecast while it trains -> soup -> report (docs/story.md)
story: $(STORY)
	@echo "report:     $(STORY)   (open it in a browser)"
	@echo "pilot:      pilots/story/pilot.png"

$(STORY): $(STAMP)
	rm -rf runs/story runs/story-base runs/story-soup pilots/story corpora/story
	$(LAUNCH) data sample
	test -d models/qwen25-tiny || $(LAUNCH) --recipe qwen25_tiny --name story-base
	test -d models/qwen25-tiny || $(LAUNCH) convert export runs/story-base models/qwen25-tiny
	$(LAUNCH) data prepare launcher report watch --as-text .py --tokenizer models/qwen25-tiny --output corpora/story
	$(LAUNCH) plan $(STORY_RUN) data.blend=docs/examples/blends/story.yaml
	$(LAUNCH) pilot $(STORY_RUN) --name story --budget 90%
	command=$$($(BIN)/python -c 'import json; print(json.load(open("pilots/story/pilot.json"))["command"])'); \
	$$command --name story data.blend=docs/examples/blends/story.yaml "forgetting_budget={'prose': 0.2}" \
	  trainer.val_check_interval=10 log.ckpt.every_n_train_steps=20 log.ckpt.keep_last=5 & run=$$!; \
	until $(LAUNCH) forecast story --at 100 2>/dev/null; do kill -0 $$run || exit 1; sleep 5; done; wait $$run
	$(LAUNCH) soup story --last 4 --shape uniform --keep story-soup
	$(LAUNCH) passport story
	$(LAUNCH) report story

# style, types, imports, and the tests that need no NeMo
check: $(STAMP)
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target style types light

style:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

types:
	$(BIN)/mypy

light:
	$(BIN)/pytest --numprocesses 2 -m "not nemo and not slow"

# TESTS is a pytest marker expression. Three workers on two cores: the tests of Slurm and Docker mostly wait
TESTS ?= not slow
test: $(STAMP)
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target style types every

every:
	$(BIN)/pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder -m "$(TESTS)"

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# which folder imports which: one direction only
imports: $(STAMP)
	@$(BIN)/python -m tests.import_graph

clean:
	rm -rf $(VENV) runs corpora models
