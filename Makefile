PYTHON ?= python3
VENV ?= .venv
BIN := $(abspath $(VENV)/bin)
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
# DeepSpeed builds its CPU communication with ninja from PATH; one thread per rank keeps ranks from slowing each other.
RUN := PATH="$(BIN):$$PATH" DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 $(BIN)/python

.PHONY: demo test check bench test-oldest clean

demo: $(VENV)/ready
	$(RUN) examples/deepspeed_gpt/demo.py

test: $(VENV)/ready
	$(RUN) -m pytest

check: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/ready
	$(RUN) benchmarks/deepspeed_speed.py

# The distributed tests again on the oldest DeepSpeed that is supported.
test-oldest: .venv-oldest/ready
	PATH="$(abspath .venv-oldest/bin):$$PATH" DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest -m distributed

# torch first: DeepSpeed's build looks for it.
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt -e ".[deepspeed,plot,cli,test,dev]"
	touch $@

.venv-oldest/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip --quiet install -c constraints.txt torch
	grep -v '^deepspeed==' constraints.txt > .venv-oldest/constraints.txt
	.venv-oldest/bin/python -m pip --quiet install -c .venv-oldest/constraints.txt -e ".[plot,cli,test]" deepspeed==0.19.3
	touch $@

clean:
	rm -rf .venv .venv-oldest build runs
