#!/bin/sh
# Runs a test program with the options of the sanitizers it may have been built with.
# usage: tests/run.sh RUNNER [ARGUMENT ...]
export ASAN_OPTIONS="detect_leaks=1:exitcode=99:$ASAN_OPTIONS"
export LSAN_OPTIONS="exitcode=99:$LSAN_OPTIONS"
export UBSAN_OPTIONS="print_stacktrace=1:$UBSAN_OPTIONS"
export TSAN_OPTIONS="halt_on_error=1:exitcode=66:atexit_sleep_ms=200:$TSAN_OPTIONS"

case $1 in
*-asan/* | *-tsan/*) export TEST_TIMEOUT="${TEST_TIMEOUT:-120}" ;;
esac

# ThreadSanitizer of older compilers does not start where the kernel scatters memory widely.
plain=
if ! "$1" --list >/dev/null 2>&1; then
    plain="setarch $(uname -m) -R"
    $plain "$1" --list >/dev/null 2>&1 || plain=
fi
exec $plain "$@"
