#!/bin/sh
# The acceptance in a quarter of an hour, on a machine with a GPU, Python and torch, and no network. `make gpu-wheels`
# collects build/gpu/wheels elsewhere. Arguments go to the acceptance; a second start runs what has no result.
set -e
cd "$(dirname "$0")/../.."
test -d build/gpu/site || python3 -m pip install --quiet --no-index --no-deps --target build/gpu/site build/gpu/wheels/*.whl
export PYTHONPATH="$PWD:$PWD/build/gpu/site" OMP_NUM_THREADS=1 CUDA_DEVICE_MAX_CONNECTIONS=32
exec python3 -m benchmarks.gpu.acceptance --minutes 14 \
  --part probe pipeline-one-gpu hot-path memory backward-time "$@"
