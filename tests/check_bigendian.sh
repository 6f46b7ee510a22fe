#!/bin/sh
# The tests and the fuzz targets of npz and files on a machine that has its bytes the other way
# round: s390x, under qemu-user. With BRIEF=1, as in `make check`, the tests alone.
# usage: tests/check_bigendian.sh
. "$(dirname "$0")/tally.sh"

cc=s390x-linux-gnu-gcc
qemu=qemu-s390x
for tool in $cc $qemu; do
    if ! command -v $tool >/dev/null 2>&1; then
        packages="gcc-s390x-linux-gnu libc6-dev-s390x-cross qemu-user"
        skip "npz on s390x: no $tool (apt-get install $packages)"
        finish
    fi
done

build=build/s390x
mkdir -p $build
flags="-std=gnu11 -O1 -DTEST_SANITIZED=1 -static -pthread" # as slow as with a sanitizer
# shellcheck disable=SC2086 # a list of options
$cc $flags tests/main.c tests/test_npz*.c tests/test_inflate.c tests/test_files.c \
    -o $build/runner -lm || exit 1
modules="inflate. files. $(sed -n 's/^TEST_TABLE(\(npz[a-z_]*\)).*/\1./p' tests/test_npz*.c)"
# shellcheck disable=SC2086 # a list of modules
TEST_TIMEOUT=${TEST_TIMEOUT:-120} $qemu $build/runner $modules >"$scratch/log" 2>&1
status=$?
grep -v '^ok ' "$scratch/log" | grep -vE '^[0-9]+ passed'
set -- $(grep -E '^[0-9]+ passed, [0-9]+ failed' "$scratch/log" | tail -n 1 | tr -dc '0-9 ') 0 0 0
passed=$1
failed=$2
skipped=$3
[ $status -eq 0 ] || [ "$failed" -gt 0 ] || not_ok "the runner ended with $status"

[ -z "$BRIEF" ] || finish
for target in npy directory inflate npz roundtrip files text; do
    set -- "tests/corpus/$target"
    # shellcheck disable=SC2086 # a list of options
    $cc $flags -DFUZZ_DRIVER -DFUZZ_NO_ZLIB tests/fuzz_$target.c -o $build/driver_$target || exit 1
    check "fuzz_$target" $qemu $build/driver_$target -runs=300 "$@"
done
finish
