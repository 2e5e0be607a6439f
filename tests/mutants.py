# SPDX-License-Identifier: Apache-2.0
"""Breaks the tree one line at a time and says whether the tests mapped to that trap notice (`make mutants`).

Works on a copy; a C++ mutation rebuilds the CPU library only. Exit status 0: every mutation was killed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
TRAPS = ROOT / "tests" / "traps.toml"
BUILDS = ("python", "cpu")
TEST_SECONDS = 300


@dataclass(frozen=True)
class Mutation:
    trap: int
    file: str
    old: str
    new: str
    build: str
    tests: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.trap:>2} {self.file}: {' '.join(self.new.split())[:60]}"


@dataclass(frozen=True)
class Trap:
    number: int
    title: str
    tests: tuple[str, ...]
    mutations: tuple[Mutation, ...]


def load_traps(path: Path = TRAPS) -> list[Trap]:
    """The traps of traps.toml; a key that is missing or unknown is an error."""
    with path.open("rb") as file:
        entries = tomllib.load(file)["trap"]
    return [_trap(**entry) for entry in entries]


def _trap(*, number: int, title: str, tests: list[str], mutation: list[dict]) -> Trap:
    mutations = (_mutation(number, tests, **entry) for entry in mutation)
    return Trap(number, title, tuple(tests), tuple(mutations))


def _mutation(
    trap: int,
    trap_tests: list[str],
    *,
    file: str,
    old: str,
    new: str,
    build: str = "python",
    tests: list[str] | None = None,
) -> Mutation:
    if build not in BUILDS:
        raise ValueError(f"trap {trap}: build is {build!r}, expected one of {BUILDS}")
    return Mutation(trap, file, old, new, build, tuple(tests or trap_tests))


def mutated(text: str, mutation: Mutation) -> str:
    """`text` with the mutation applied; it must find its old text exactly once."""
    count = text.count(mutation.old)
    if count != 1:
        raise ValueError(f"{mutation.name}: old text found {count} times in {mutation.file}")
    return text.replace(mutation.old, mutation.new)


class Copy:
    """A copy of the working tree with a build folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.tree = folder / "tree"
        self.build_dir = folder / "build"
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for name in filter(None, names.split("\0")):
            if (ROOT / name).is_file():
                (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.tree / name)

    def configure(self) -> None:
        self._run("cmake", "-S", str(self.tree), "-B", str(self.build_dir), "-G", "Ninja",
                  "-DDFLASH_CUDA=OFF", f"-DPython_EXECUTABLE={sys.executable}")  # fmt: skip

    def build(self) -> None:
        self._run("cmake", "--build", str(self.build_dir), "-j", "2")
        self._run("cmake", "--install", str(self.build_dir), "--component", "python",
                  "--prefix", str(self.tree / "python"))  # fmt: skip

    def _run(self, *command: str) -> None:
        result = subprocess.run(command, cwd=self.tree, capture_output=True, text=True, check=False)
        if result.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{(result.stdout + result.stderr)[-3000:]}")

    def test(self, tests: tuple[str, ...]) -> tuple[int | None, str]:
        """pytest's exit status (None: it hung) and the end of its output."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        environment = os.environ | {
            "PYTHONPATH": str(self.tree / "python"),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        try:
            result = subprocess.run(
                command, cwd=self.tree, env=environment, capture_output=True, text=True,
                timeout=TEST_SECONDS, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return None, ""
        return result.returncode, (result.stdout + result.stderr)[-3000:]


def verdict(copy: Copy, mutation: Mutation) -> tuple[str, str]:
    """killed, survived or error, and what explains the last two."""
    path = copy.tree / mutation.file
    original = path.read_text()
    try:
        path.write_text(mutated(original, mutation))
        if mutation.build == "cpu":
            copy.build()
        status, output = copy.test(mutation.tests)
    except (RuntimeError, ValueError) as error:
        return "error", str(error)
    finally:
        path.write_text(original)
    # 1 = a test failed, 0 = none did; anything else means that the tests did not run.
    if status in (None, 1):
        return "killed", ""
    return ("survived" if status == 0 else "error"), output


def run(mutations: list[Mutation], copy: Copy) -> int:
    """Prints one line a mutation; returns how many were not killed."""
    not_killed = 0
    for mutation in mutations:
        start = time.perf_counter()
        answer, output = verdict(copy, mutation)
        print(f"{answer:9}{time.perf_counter() - start:6.1f} s  {mutation.name}", flush=True)
        if answer != "killed":
            not_killed += 1
            print(output, flush=True)
    return not_killed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trap", type=int, action="append", help="only this trap; repeatable")
    parser.add_argument("--skip-baseline", action="store_true", help="do not test the tree itself")
    arguments = parser.parse_args()
    traps = [t for t in load_traps() if not arguments.trap or t.number in arguments.trap]
    # Mutations of the CPU library last: each rebuild also restores the one before.
    mutations = sorted((m for t in traps for m in t.mutations), key=lambda m: m.build != "python")
    with tempfile.TemporaryDirectory(prefix="dflash-mutants-") as folder:
        copy = Copy(Path(folder))
        copy.configure()
        copy.build()
        if not arguments.skip_baseline:
            status, output = copy.test(tuple(dict.fromkeys(x for m in mutations for x in m.tests)))
            if status != 0:
                print(f"the tests fail before any mutation:\n{output}")
                return 2
        not_killed = run(mutations, copy)
    print(f"{len(mutations) - not_killed} of {len(mutations)} mutations killed")
    return 1 if not_killed else 0


if __name__ == "__main__":
    sys.exit(main())
