#!/bin/sh
# Which branches of the sections crc to npz the tests take: the share of them, and those that never
# were. The fuzz targets, with their corpus alone, count when FUZZ_RUNS is set: to 0, or to more.
# usage: [FUZZ_RUNS=N] tests/coverage_npz.sh
cd "$(dirname "$0")/.." || exit 1
for tool in clang llvm-cov llvm-profdata python3; do
    command -v $tool >/dev/null 2>&1 && continue
    echo "no $tool (apt-get install clang llvm python3)"
    exit 1
done

build=$PWD/build/coverage
rm -rf "$build"
mkdir -p "$build"
flags="-std=gnu11 -O1 -g -fprofile-instr-generate -fcoverage-mapping -pthread"
export LLVM_PROFILE_FILE="$build/%p.profraw" # one for each test: it is a process

# shellcheck disable=SC2086 # a list of options
clang $flags tests/main.c tests/test_npz*.c $(ls tests/test_inflate*.c 2>/dev/null) \
    -o "$build/runner" -lm || exit 1
modules=$(sed -n 's/^TEST_TABLE(\([a-z_]*\)).*/\1./p' tests/test_npz*.c tests/test_inflate*.c)
# shellcheck disable=SC2086 # a list of modules
TEST_TIMEOUT=${TEST_TIMEOUT:-120} "$build/runner" $modules >"$build/log" 2>&1 ||
    grep -v '^ok ' "$build/log"

objects=
for target in ${FUZZ_RUNS:+npy directory inflate npz roundtrip}; do
    # shellcheck disable=SC2086 # a list of options
    clang $flags -DFUZZ_DRIVER -DFUZZ_NO_ZLIB "tests/fuzz_$target.c" -o "$build/driver_$target" &&
        "$build/driver_$target" "-runs=$FUZZ_RUNS" "tests/corpus/$target" >/dev/null || exit 1
    objects="$objects -object $build/driver_$target"
done

cd "$build" || exit 1
llvm-profdata merge -sparse ./*.profraw -o all.profdata || exit 1
# shellcheck disable=SC2086 # a list of options
llvm-cov export -format=text -instr-profile=all.profdata runner $objects >branches.json || exit 1
exec python3 ../../tests/coverage_npz.py ../../spdl.h branches.json
