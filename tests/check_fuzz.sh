#!/bin/sh
# The fuzz targets without libFuzzer: their corpus, then inputs made from it, always the same ones.
# usage: tests/check_fuzz.sh RUNS TARGET ...
. "$(dirname "$0")/tally.sh"
export ASAN_OPTIONS="detect_leaks=1:handle_segv=0:handle_abort=0:$ASAN_OPTIONS"
export UBSAN_OPTIONS="print_stacktrace=1:$UBSAN_OPTIONS"

runs=$1
shift
for target; do
    set -- "tests/corpus/$target"
    [ "$target" = npz ] && set -- "$@" tests/data
    check "fuzz_$target" "build/fuzz/driver_$target" "-runs=$runs" "$@"
done
finish
