# SPDX-License-Identifier: Apache-2.0
"""Checks a built wheel: its tag, what is in it, torch's stable ABI, and that it works with and without dflash._C.

    python tests/check_wheel.py [--cuda] dist/dflash_cuda-*.whl

With --cuda the CUDA kernels have to be in it, without they must not: one built without nvcc serves no GPU.
auditwheel gave the tag (`make wheel`); this reads it. torch-abi-audit looks at the op libraries' symbols.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

NEWEST_MANYLINUX = 35  # glibc 2.35: Ubuntu 22.04
REQUIRED = [
    r"dflash/__init__\.py",
    r"dflash/py\.typed",
    r"dflash/_C\.cpython-.*\.so",
    r"dflash/lib/libdflash_ops\.so",
    r"dflash/lib/cmake/dflash/dflash-config\.cmake",
    r"dflash/include/dflash/ops\.h",
    r"dflash/data/smollm2-135m-dflash-b8/model\.safetensors",
]

CUDA_LIBRARY = "dflash/lib/libdflash_cuda.so"

SMOKE = """
import importlib.util, sys, torch, dflash
from dflash.cli.info import gather
from dflash.ops.silu_mul import silu_mul, silu_mul_reference
x = torch.randn(3, 16)
torch.testing.assert_close(silu_mul(x), silu_mul_reference(x))
facts = gather()
assert dflash.__file__.startswith(sys.argv[1]), dflash.__file__
assert facts["libraries"]["libdflash_ops"].startswith(sys.argv[1])
found = importlib.util.find_spec("dflash._C") is not None
assert found == bool(facts["build"]) == ("dflash._C" not in facts["unavailable"]), facts
print("with" if found else "without")
"""


def problems_of_name(wheel: Path) -> list[str]:
    tag = wheel.stem.split("-", 2)[2]
    match = re.fullmatch(r"py3-none-manylinux_2_(\d+)_x86_64", tag)
    if match is None or int(match[1]) > NEWEST_MANYLINUX:
        return [f"tag {tag}: expected py3-none-manylinux_2_{NEWEST_MANYLINUX}_x86_64 or older"]
    return []


def problems_of_contents(names: list[str], cuda: bool) -> list[str]:
    problems = [f"no {x}" for x in REQUIRED if not any(re.fullmatch(x, name) for name in names)]
    if (CUDA_LIBRARY in names) != cuda:
        problems.append(f"{CUDA_LIBRARY}: " + ("missing" if cuda else "there, without --cuda"))
    for name in names:
        if not re.match(r"dflash/|dflash_cuda-[^/]*\.dist-info/", name):
            problems.append(f"{name} does not belong here")
        if re.search(r"/lib(torch|c10)[^/]*\.so", name):
            problems.append(f"{name}: torch must not be packed")
    return problems


def problems_of_abi(package: Path) -> list[str]:
    """What torch-abi-audit says of the op libraries, if it is not "stable"."""
    audits = [
        subprocess.run(["torch-abi-audit", "--check", "torch", "-v", str(library)], text=True,
                       stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for library in sorted((package / "lib").glob("libdflash_*.so"))
    ]  # fmt: skip
    return [audit.stdout for audit in audits if audit.returncode != 0]


def run_smoke(site: Path) -> str:
    """ "with" or "without" dflash._C, from an interpreter that sees the wheel's files before all others."""
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    command = [
        sys.executable,
        "-P" if sys.version_info >= (3, 11) else "-B",
        "-c",
        SMOKE,
        str(site),
    ]
    result = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path},
        cwd=site,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return result.stdout.strip()


def check(wheel: Path, cuda: bool) -> list[str]:
    """What is wrong with the wheel; nothing when it is good."""
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as directory:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        problems = problems_of_name(wheel) + problems_of_contents(names, cuda)
        site = Path(directory).resolve()
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--disable-pip-version-check",
            "--no-deps",
        ]
        subprocess.run([*pip, "--no-compile", "--target", str(site), str(wheel)], check=True)
        problems += problems_of_abi(site / "dflash")
        runs = [run_smoke(site)]
        for extension in (site / "dflash").glob("_C.*.so"):
            extension.unlink()
        runs.append(run_smoke(site))
        if runs != ["with", "without"]:
            problems.append(f"dflash._C in two runs, its file removed before the second: {runs}")
        return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("wheels", nargs="+")
    args = parser.parse_args()
    for name in args.wheels:
        problems = check(Path(name), args.cuda)
        for problem in problems:
            print(f"{name}: {problem}", file=sys.stderr)
        if problems:
            sys.exit(1)
        size = Path(name).stat().st_size / 1e6
        kind = "CPU and CUDA kernels" if args.cuda else "CPU kernels ONLY (no nvcc here)"
        print(
            f"{name} ({size:.0f} MB), {kind}: tag, contents and stable ABI are right; works without dflash._C too"
        )


if __name__ == "__main__":
    main()
