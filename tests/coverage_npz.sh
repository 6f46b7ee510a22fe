#!/bin/sh
# Which branches of the sections crc to npz the tests of npz take: the share, and those never taken.
# The fuzz targets count only with FUZZ_RUNS.
# usage: [FUZZ_RUNS=N] tests/coverage_npz.sh
cd "$(dirname "$0")/.." || exit 1
root=$PWD
build=$root/build/coverage
rm -rf "$build"
mkdir -p "$build"
flags="-std=gnu11 -O0 -g --coverage -fprofile-update=atomic -pthread"

for file in tests/main.c tests/test_npz*.c; do
    # shellcheck disable=SC2086 # a list of options
    gcc $flags -c "$file" -o "$build/$(basename "$file" .c).o" || exit 1
done
gcc --coverage "$build"/*.o -o "$build/runner" -lpthread -lm || exit 1
modules=$(sed -n 's/^TEST_TABLE(\(npz[a-z_]*\)).*/\1./p' tests/test_npz*.c)
# shellcheck disable=SC2086 # a list of modules
TEST_TIMEOUT=${TEST_TIMEOUT:-120} "$build/runner" $modules >"$build/log" 2>&1 ||
    { grep -v '^ok ' "$build/log"; exit 1; }

for target in ${FUZZ_RUNS:+npy directory inflate npz roundtrip}; do
    # shellcheck disable=SC2086 # a list of options
    gcc $flags -DFUZZ_DRIVER -c "tests/fuzz_$target.c" -o "$build/fuzz_$target.o" &&
        gcc --coverage "$build/fuzz_$target.o" -o "$build/driver_$target" -lpthread -lz &&
        "$build/driver_$target" "-runs=$FUZZ_RUNS" "tests/corpus/$target" >/dev/null || exit 1
done

cd "$build" || exit 1
gcov --json-format --stdout ./*.gcda 2>/dev/null >branches.json
exec python3 "$root/tests/coverage_npz.py" "$root/spdl.h" branches.json
