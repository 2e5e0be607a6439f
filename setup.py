"""Builds the op libraries and dflash._C with CMake; everything else is in pyproject.toml."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()


class CMakeBuild(build_ext):
    """One CMake configure and build; an editable install leaves the libraries in python/dflash."""

    def build_extension(self, ext: Extension) -> None:
        built = Path(self.get_ext_fullpath(ext.name)).parent.resolve()
        package = ROOT / "python" / "dflash" if self.editable_mode or self.inplace else built
        build = Path(self.build_temp).resolve()
        build.mkdir(parents=True, exist_ok=True)
        configure = [
            "cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DDFLASH_CUDA={os.environ.get('DFLASH_CUDA', 'AUTO')}",
            *os.environ.get("CMAKE_ARGS", "").split(),
        ]  # fmt: skip
        subprocess.run(configure, check=True)
        jobs = os.environ.get("MAX_JOBS", str(os.cpu_count() or 1))
        subprocess.run(["cmake", "--build", str(build), "-j", jobs], check=True)
        install = ["cmake", "--install", str(build), "--component", "python", "--strip"]
        subprocess.run([*install, "--prefix", str(package.parent)], check=True)
        if package != built:  # setuptools copies the extension from here into the source tree
            built.mkdir(parents=True, exist_ok=True)
            shutil.copy2(next(package.glob("_C.*.so")), built)


setup(ext_modules=[Extension("dflash._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
