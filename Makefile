# SPDX-License-Identifier: Apache-2.0
# make demo | test | long | lint | wheel | docs | mutants | clean. Everything happens in $(VENV); nothing else is touched.
#   PYTHON  interpreter of the environment, 3.10 or newer
#   TORCH   what pip installs for torch: any torch>=2.11
#   PROMPT  what the demo asks
#   DFLASH_CUDA  AUTO compiles the CUDA sources of test and wheel where nvcc is, ON demands it, OFF does not
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
CXX ?= c++
PROMPT ?= Write a Python function that returns the sum of the even numbers in a list.
PYTEST_FLAGS ?=
DFLASH_CUDA ?= AUTO

BIN := $(VENV)/bin
export PATH := $(abspath $(BIN)):$(PATH)
PIP := $(BIN)/python -m pip --disable-pip-version-check
BUILD_REQUIRES := numpy setuptools\>=77 wheel pybind11\>=2.13 cmake\>=3.26 ninja
BUILD_INPUTS := CMakeLists.txt setup.py pyproject.toml $(shell find csrc third_party -type f)
# CUTLASS's headers only, beside the environment: the package's own dependencies are not wanted in it.
CUTLASS := $(if $(shell command -v nvcc),build/cutlass/cutlass_library/source)
CUTLASS_FLAG := $(if $(CUTLASS),-DCUTLASS_DIR=$(abspath $(CUTLASS)))
MANYLINUX := manylinux_2_35_x86_64
JOBS := $(or $(MAX_JOBS),$(shell nproc))
# The CUDA library needs a CUDA build of torch to load, so the demo on a CPU build does not compile it.
CUDA_OF_TORCH = $$($(BIN)/python -c "import torch; print('AUTO' if torch.version.cuda else 'OFF')")

.PHONY: help demo test long ctest pytest lint wheel docs mutants clean googletest
help:
	@sed -n '2,6s/^# *//p' Makefile

demo: $(VENV)/.ready
	@$(BIN)/dflash generate --compare "$(PROMPT)"

test: ctest pytest

# One build directory: the editable install fills it, this adds the C++ tests and, where nvcc is, the CUDA sources.
ctest: $(VENV)/.ready $(CUTLASS) googletest
	$(BIN)/cmake -S . -B build/cmake -DDFLASH_BUILD_TESTS=ON -DDFLASH_CUDA=$(DFLASH_CUDA) $(CUTLASS_FLAG)
	$(BIN)/cmake --build build/cmake -j $(JOBS)
	$(BIN)/cmake --install build/cmake --component python --strip --prefix python
	$(BIN)/ctest --test-dir build/cmake --output-on-failure --no-tests=error \
	  $$(nvidia-smi -L >/dev/null 2>&1 || echo -LE gpu)

pytest: $(VENV)/.test-ready
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

long: $(VENV)/.test-ready
	$(BIN)/python -m pytest -m long tests

lint: $(VENV)/.lint-ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@if $(BIN)/pyright --version >/dev/null 2>&1; then $(BIN)/pyright --pythonpath $(BIN)/python; \
	else echo "pyright cannot start here (it needs node or the npm registry): types not checked"; fi

# On ctest's build folder: what is compiled there is not compiled again. auditwheel reads the tag off the symbols.
wheel: $(VENV)/.wheel-ready $(CUTLASS)
	rm -rf build/lib.* build/bdist.* build/wheel
	DFLASH_CUDA=$(DFLASH_CUDA) DFLASH_BUILD_DIR=build/cmake CMAKE_ARGS="$(CUTLASS_FLAG)" MAX_JOBS=$(JOBS) \
	  $(PIP) wheel --no-build-isolation --no-deps -w build/wheel .
	$(BIN)/auditwheel repair --plat $(MANYLINUX) --only-plat --exclude 'libtorch*' --exclude 'libc10*' \
	  -w dist build/wheel/dflash_cuda-*.whl
	$(BIN)/python tests/check_wheel.py $(if $(CUTLASS_FLAG),$(if $(filter OFF,$(DFLASH_CUDA)),,--cuda)) dist/dflash_cuda-*$(MANYLINUX).whl

docs: $(VENV)/.ready
	$(BIN)/python docs/generate_ops.py
	$(BIN)/python docs/generate_header.py

mutants: $(VENV)/.test-ready
	$(BIN)/python tests/mutants.py

clean:
	rm -rf build dist $(VENV) python/dflash/lib python/dflash/include python/dflash/_C.*.so python/*.egg-info

googletest:
	@has() { echo '#include <gtest/gtest.h>' | $(CXX) -E -x c++ - >/dev/null 2>&1; }; \
	has && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -qq && apt-get install -y -qq libgtest-dev >/dev/null; fi; \
	has || { echo "GoogleTest is missing. Run: sudo apt-get install libgtest-dev" >&2; exit 1; }

# Setup in stamped steps: what is done is not done again.
$(VENV)/.tools: pyproject.toml
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10))" || { \
	  echo "dflash needs Python 3.10 or newer; $(PYTHON) is not. Run: make PYTHON=python3.11 ..." >&2; exit 1; }
	@command -v $(CXX) >/dev/null || { \
	  echo "no C++ compiler ($(CXX)). Run: sudo apt-get install g++, or make CXX=<compiler> ..." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "cannot make $(VENV). On Debian run: sudo apt-get install python3-venv" >&2; exit 1; }
	@echo "dflash: installing $(TORCH) and the build tools into $(VENV)"
	@$(PIP) install --quiet "$(TORCH)" $(BUILD_REQUIRES)
	@touch $@

build/cutlass/cutlass_library/source: | $(VENV)/.tools
	@$(PIP) install --quiet --no-deps --target build/cutlass nvidia-cutlass==4.2.0.0

$(VENV)/.ready: $(VENV)/.tools $(BUILD_INPUTS) | $(CUTLASS)
	@echo "dflash: building"
	@DFLASH_CUDA=$(CUDA_OF_TORCH) CMAKE_ARGS="$(CUTLASS_FLAG)" MAX_JOBS=$(JOBS) \
	  $(PIP) install --quiet --no-build-isolation -e .
	@touch $@

$(VENV)/.test-ready: $(VENV)/.ready
	@$(PIP) install --quiet "dflash-cuda[test]"
	@touch $@

$(VENV)/.wheel-ready: $(VENV)/.ready
	@$(PIP) install --quiet "dflash-cuda[wheel]"
	@touch $@

$(VENV)/.lint-ready: $(VENV)/.ready
	@$(PIP) install --quiet "dflash-cuda[lint]"
	@touch $@
