# SPDX-License-Identifier: Apache-2.0
"""Builds the op libraries and dflash._C with CMake; everything else is in pyproject.toml.

DFLASH_CUDA (AUTO, ON, OFF), DFLASH_BUILD_DIR (CMake's build folder, to build on one that is there), CMAKE_ARGS and
MAX_JOBS are read from the environment.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import cmake
import ninja
from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
# The required versions, not older ones of the system that may come first on PATH.
TOOLS = os.pathsep.join([cmake.CMAKE_BIN_DIR, ninja.BIN_DIR, os.environ["PATH"]])


def run(*command: str) -> None:
    subprocess.run(command, check=True, env={**os.environ, "PATH": TOOLS})


class CMakeBuild(build_ext):
    """One CMake configure and build; an editable install leaves the libraries in python/dflash.

    An editable build stays in build/cmake, where `make test` adds the C++ tests to it.
    """

    def build_extension(self, ext: Extension) -> None:
        built = Path(self.get_ext_fullpath(ext.name)).parent.resolve()
        editable = self.editable_mode or self.inplace
        package = ROOT / "python" / "dflash" if editable else built
        temporary = os.environ.get("DFLASH_BUILD_DIR", self.build_temp)
        build = str(ROOT / "build" / "cmake" if editable else Path(temporary).resolve())
        run(
            "cmake", "-S", str(ROOT), "-B", build, "-G", "Ninja",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DDFLASH_CUDA={os.environ.get('DFLASH_CUDA', 'AUTO')}",
            *os.environ.get("CMAKE_ARGS", "").split(),
        )  # fmt: skip
        run("cmake", "--build", build, "-j", os.environ.get("MAX_JOBS", str(os.cpu_count() or 1)))
        prefix = str(package.parent)
        run("cmake", "--install", build, "--component", "python", "--strip", "--prefix", prefix)
        if package != built:  # setuptools copies the extension from here into the source tree
            built.mkdir(parents=True, exist_ok=True)
            shutil.copy2(next(package.glob("_C.*.so")), built)


class AnyPython(bdist_wheel):
    """The op libraries stand on torch's stable ABI and know no Python, and dflash._C is optional: one wheel for all."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension("dflash._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "bdist_wheel": AnyPython},
)
