"""The contract suite on the oldest and the newest version of every host, and on what was published since.

    python tests/matrix.py                              # all of them; `make test-matrix`
    python tests/matrix.py deepspeed==0.19.3 --whole    # one, with the host's own distributed tests too

A version that is not installed is unpacked into a folder that comes before the environment's packages. The newest torch
brings CUDA: 5 GB. benchmarks/results/hosts/matrix.json keeps the outcomes, and docs/compatibility.md shows them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.shared.files import put_table, result_file, write_json
from benchmarks.shared.measuring import machine
from tf_adapters.cli.doctor import HOSTS, TRAINERS, SupportedHost

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "matrix"
RESULTS = result_file("hosts/matrix.json")
PAGE = ROOT / "docs" / "compatibility.md"
ENGINE = SupportedHost("Transformer Engine", "transformer-engine", "2.4.0", "2.20.2", on="megatron-core")
BETWEEN = [("torch", "2.11"), (ENGINE.package, "2.10.0")]
PACKAGES = {host.package: host for host in (*HOSTS, *TRAINERS, ENGINE)}
HOST_TESTS = {
    "deepspeed": "deepspeed",
    "megatron-core": "megatron and not bridge",
    "torch": "torch and not titan",
    "torchtitan": "titan",
}
CONTRACT = (
    "hosts/contract/test_contract.py",
    "hosts/contract/test_contract_attaching.py",
    "trainers/test_torchtitan.py",
)
OF_TRAINERS = {
    "megatron-bridge": "trainers/test_bridge.py",
    "ms-swift": "trainers/test_swift.py",
    "slime": "trainers/test_slime.py",
    "nemo-automodel": "trainers/test_automodel.py",
}
"""Each runs its trainings once, in two processes of its own: all that the trainer's contract asks."""
OF_LAYERS = {
    ENGINE.package: (
        "unit/testing/test_transformer_engine_on_cpu.py",
        "unit/weight_gradients/test_engine_taps.py",
        "hosts/megatron/test_megatron_transformer_engine.py",
        "hosts/torch_pipelining/test_torch_user_layers.py",
        "hosts/deepspeed/test_deepspeed_user_layers.py",
    )
}
"""Its own Python, without a GPU, alone and on each host."""
CHECKOUTS = {"slime": ("SLIME_SOURCE", "MEGATRON_LM_SOURCE")}
"""What no package index has, by the variables that name its folders."""
BUILD_SHM = "from deepspeed.comm.torch import build_shm_op; build_shm_op()"
# Megatron-Core's newer wheels ask for Python 3.12; their code runs on 3.11.
DOWNLOAD = ("--no-deps", "--no-build-isolation", "--ignore-requires-python")


BESIDE = {("torchtitan", "0.3.0"): ("torch", "2.15"), ("megatron-bridge", "0.6.2"): ("megatron-core", "0.19.2")}
"""What a version needs that is not installed, too."""
_OF_HUGGING_FACE = ("transformers==5.18.0", "accelerate", "tiktoken", "peft==0.20.0")
REQUIRED = {
    "transformer-engine": ("ml_dtypes", "nvdlfw-inspect", "onnx", "onnx-ir", "onnxscript"),
    "torchtitan": ("spmd_types==0.2.3", "torch_checkpointing>=0.1"),
    "megatron-bridge": ("omegaconf==2.3.0", "hydra-core==1.3.2", "antlr4-python3-runtime==4.9.3", "six"),
    "nemo-automodel": (*_OF_HUGGING_FACE, "torchao", "flashoptim", "megatron-fsdp==0.5.0", "mistral-common"),
    "ms-swift": (
        *(*_OF_HUGGING_FACE, "modelscope", "modelscope_hub", "cryptography", "cffi", "addict", "attrdict", "trl<1.0"),
        *("binpacking", "dacite", "json-repair", "oss2", "rouge", "simplejson", "nltk", "aiohttp", "aiosignal"),
        *("aiohappyeyeballs", "frozenlist", "propcache", "multidict", "yarl", "attrs"),
    ),
}
"""What is imported and not installed; pip takes no more along, and no torch."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", metavar="PACKAGE==VERSION", help=f"of {', '.join(PACKAGES)}")
    parser.add_argument("--whole", action="store_true", help="the host's own distributed tests too")
    args = parser.parse_args()
    chosen = [tuple(text.split("==")) for text in args.versions] or [*tested(), *newer()]
    failed = False
    for package, version in chosen:
        print(f"{package} {version} ...", flush=True)
        absent = [name for name in CHECKOUTS.get(package, ()) if name not in os.environ]
        if absent:
            print(f"left out: {absent[0]} names no checkout")
            continue
        row = run(package, version, args.whole)
        print(json.dumps(row), flush=True)
        keep(row)
        failed |= bool(row["failed"])
    sys.exit(failed)


def tested() -> list[tuple[str, str]]:
    pairs = ((package, version) for package, host in PACKAGES.items() for version in (host.oldest, host.newest))
    return list(dict.fromkeys([*pairs, *BETWEEN]))


def newer() -> list[tuple[str, str]]:
    """What the package index has above the newest tested version, pre-releases too."""
    found = []
    for package, host in PACKAGES.items():
        if package in CHECKOUTS:
            continue
        command = [sys.executable, "-m", "pip", "index", "versions", "--pre", "--ignore-requires-python", package]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        newest = re.search(r"Available versions: ([^,\s]+)", listed)
        if newest and numbers(newest[1]) > numbers(host.newest):
            found.append((package, newest[1]))
    return found


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, [*re.findall(r"\d+", version), "0", "0"][:3]))


def run(package: str, version: str, whole: bool) -> dict[str, object]:
    """The outcome of the tests of a host's adapter under one version of it."""
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    if package not in CHECKOUTS and not (installed(package) or "").startswith(version):
        wanted = [(package, version), *([BESIDE[package, version]] if (package, version) in BESIDE else [])]
        overlays = [str(unpacked(*one)) for one in wanted]
        before = [*overlays, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment |= {"PYTHONPATH": os.pathsep.join(before), "TORCH_EXTENSIONS_DIR": f"{overlays[0]}/extensions"}
    if package == "deepspeed":
        subprocess.run([sys.executable, "-c", BUILD_SHM], env=environment, check=True, capture_output=True)
    report = FOLDER / f"{package}-{version}.xml"
    FOLDER.mkdir(parents=True, exist_ok=True)
    if package in OF_TRAINERS:
        files, options = [OF_TRAINERS[package]], []
    elif package in OF_LAYERS:
        files, options = list(OF_LAYERS[package]), ["-n", "2", "--dist", "worksteal"]
    else:
        files, options = (
            ["."] if whole else list(CONTRACT),
            ["-k", HOST_TESTS[package], "-n", "2", "--dist", "worksteal"],
        )
    options += ["-m", "distributed or programs", "--maxfail", "1000", "-q", "-p", "no:cacheprovider"]
    options.append(f"--junitxml={report}")
    began = time.monotonic()
    command = [sys.executable, "-m", "pytest", *(str(ROOT / "tests" / name) for name in files), *options]
    subprocess.run(command, env=environment, check=False, cwd=ROOT)
    suite = ElementTree.parse(report).getroot()[0].attrib
    counts = {name: int(suite[name]) for name in ("tests", "failures", "errors", "skipped")}
    failed = counts["failures"] + counts["errors"]
    return {
        "package": package,
        "version": version,
        "tests": kind_of_tests(package, whole),
        "passed": counts["tests"] - failed - counts["skipped"],
        "failed": failed,
        "skipped": counts["skipped"],
        "seconds": round(time.monotonic() - began),
    }


def kind_of_tests(package: str, whole: bool) -> str:
    if package in OF_TRAINERS or package in OF_LAYERS:
        return "trainings" if package in OF_TRAINERS else "layers"
    return "contract and the host's own" if whole else "contract"


def installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def unpacked(package: str, version: str) -> Path:
    """A folder that holds one version of a package; torch with all that it brings."""
    overlay = FOLDER / f"{package}-{version}"
    if not (overlay / "ready").exists():
        options = [] if package == "torch" else DOWNLOAD
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", *options]
        wanted = (f"{package}=={version}", *REQUIRED.get(package, ()))
        subprocess.run([*pip, "--upgrade", "--target", str(overlay), *wanted], check=True)
        (overlay / "ready").touch()
    return overlay


def keep(row: dict[str, object]) -> None:
    rows = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    kept = [other for other in rows if (other["package"], other["version"]) != (row["package"], row["version"])]
    order = list(PACKAGES)
    rows = sorted([*kept, row], key=lambda one: (order.index(one["package"]), numbers(one["version"])))
    write_json(RESULTS, {"machine": machine(), "rows": rows})
    put_table(PAGE, "matrix", table(rows))


def table(rows: list[dict[str, object]]) -> str:
    heads = ["host", "package", "version", "tests", "passed", "failed", "skipped"]
    lines = [heads, ["---"] * len(heads)]
    for row in rows:
        host = PACKAGES[str(row["package"])]
        cells = [host.name, f"`{host.package}`", *(str(row[name]) for name in heads[2:])]
        lines.append(cells)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
