#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The GPU gate: builds for this machine's GPU, runs ctest -L gpu and pytest -m gpu, prints a summary.
#   tests/gpu/run.sh              the gate (under 8 minutes on an H200)
#   tests/gpu/run.sh --sanitize   memcheck, racecheck, synccheck and initcheck on the torch-free kernel tests
#   tests/gpu/run.sh --soak       the gate, then 3 minutes of random traffic on the demo pair (python -m tests.soak)
# PYTHON, BUILD (build folder) and CMAKE_ARGS may be set; BUILT=1 skips the build.
set -uo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
build=${BUILD:-build/gpu}
sanitize=0
soak=0
for argument in "$@"; do
  case $argument in
    --sanitize) sanitize=1 ;;
    --soak) soak=1 ;;
    *) echo "usage: tests/gpu/run.sh [--sanitize] [--soak]" >&2; exit 2 ;;
  esac
done

started=$SECONDS
if [ -z "${BUILT:-}" ]; then
  mkdir -p "$build"
  # shellcheck disable=SC2086
  cmake -S . -B "$build" -G Ninja -DPython_EXECUTABLE="$(command -v "$python")" -DDFLASH_CUDA=ON \
    -DDFLASH_CUDA_ARCHITECTURES=90a-real -DDFLASH_BUILD_TESTS=ON ${CMAKE_ARGS:-} > "$build.log" 2>&1 &&
    cmake --build "$build" >> "$build.log" 2>&1 &&
    cmake --install "$build" --component python --prefix python >> "$build.log" 2>&1 ||
    { tail -40 "$build.log"; echo "GPU gate: the build failed"; exit 1; }
fi
echo "build: $((SECONDS - started)) s"
export PYTHONPATH=$PWD/python${PYTHONPATH:+:$PYTHONPATH}
failed=()

# All tools over all kernel tests, in shards side by side: a shard keeps one core busy, not the GPU, and racecheck takes
# many times as long as the others.
sanitize() {
  local tools=(memcheck racecheck synccheck initcheck) shards pids=() names=() tool shard i passed
  rm -f "$build".*check.*.log
  for tool in "${tools[@]}"; do
    local options=(--tool "$tool" --print-limit 5 --error-exitcode 9) filter='*'
    shards=3
    [ "$tool" = memcheck ] && options+=(--leak-check full)
    # What only launches the same again, row by row, tells memcheck something new, the others nothing.
    [ "$tool" = memcheck ] || filter='-*RowsDoNotDependOnTheBatch'
    # Races repeat with every row, column and launch: what only adds more of them takes minutes here.
    [ "$tool" = racecheck ] && shards=8 && filter+=':LargeShapes/*:*RepeatsItsBitsInPlace*:*KeepsWhatTheTwinKeeps*'
    for ((shard = 0; shard < shards; shard++)); do
      GTEST_FILTER=$filter GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$shard compute-sanitizer "${options[@]}" \
        "$build/tests/cpp/dflash_gpu_tests" > "$build.$tool.$shard.log" 2>&1 &
      pids+=($!)
      names+=("$tool.$shard")
    done
  done
  for i in "${!pids[@]}"; do
    wait "${pids[$i]}" && continue
    tail -25 "$build.${names[$i]}.log"
    failed+=("${names[$i]}")
  done
  for tool in "${tools[@]}"; do
    passed=$(cat "$build.$tool".*.log | grep -c '^\[       OK')
    echo "$tool: $passed tests passed"
    [ "$passed" -gt 0 ] || failed+=("$tool: no test ran")
  done
}

if [ $sanitize = 1 ]; then
  sanitize
else
  ctest --test-dir "$build" -L gpu -j 8 --no-tests=error --output-on-failure || failed+=("ctest -L gpu")
  "$python" -m pytest -m gpu -q -p no:cacheprovider tests || failed+=("pytest -m gpu")
fi

if [ $soak = 1 ]; then
  "$python" -m tests.soak --minutes 3 --device cuda --dtype bfloat16 --num-speculative-tokens 7 \
    --min-iterations 20000 --json "$build.soak.json" || failed+=("soak")
fi

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
if [ ${#failed[@]} -gt 0 ]; then
  echo "GPU gate: FAILED: ${failed[*]} (after $((SECONDS - started)) s)"
  exit 1
fi
echo "GPU gate: passed in $((SECONDS - started)) s"
