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

LIGHT := tests/bench tests/common tests/data tests/report tests/launcher/preflight tests/launcher/test_cluster_file.py tests/launcher/test_resume.py tests/recipes/test_memory.py tests/recipes/test_plan.py tests/recipes/test_schedules.py tests/training/distributed/test_rank_env.py
check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest $(LIGHT)

# DAEMONS mostly waits: it runs beside the rest, and says its part afterwards. PARALLEL computes, and goes with the rest,
# so that both sides take as long
DAEMONS := tests/launcher/executors tests/doctor tests/training/distributed
PARALLEL := tests/training/distributed/test_parallel.py
test: check
	@$(LAUNCH) data sample > /dev/null
	@$(BIN)/pytest $(DAEMONS) --ignore=$(PARALLEL) --ignore=tests/training/distributed/test_rank_env.py > $(VENV)/cluster.log 2>&1 & \
	$(BIN)/pytest $(foreach part,$(LIGHT) $(DAEMONS),--ignore=$(part)); rest=$$?; \
	$(BIN)/pytest $(PARALLEL); parallel=$$?; \
	wait $$!; cluster=$$?; cat $(VENV)/cluster.log; exit $$((rest | parallel | cluster))

clean:
	rm -rf $(VENV) runs corpora models
