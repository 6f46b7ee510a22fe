#!/bin/sh
# Compiles the headers in every mode, and everything that includes them, with the whole set of
# warnings as errors: C99 and C17, C++11, 17 and 20, gcc and clang (`make matrix` has the standards
# between). With BRIEF=1, as in `make check`, one compiler for each standard, mode and example.
# `make check-warnings` sets WARN and WARN_C.
. "$(dirname "$0")/tally.sh"
: "${WARN:?run this by make check-warnings}"

compiler() {
    case $1 in
    gcc-c) echo gcc ;;
    gcc-c++) echo g++ ;;
    clang-c) echo clang ;;
    clang-c++) echo clang++ ;;
    esac
}

# One job: FAMILY LANGUAGE STANDARD FILE DEFINE ...
if [ "$1" = --one ]; then
    warn=$WARN_C
    [ "$3" = c++ ] && warn=$WARN
    family=$2 language=$3 std=$4 file=$5
    shift 5
    what="$family $language -std=$std $file $*"
    log=$scratch/log
    # Some warnings of gcc come only when it optimises: that takes twenty times as long, and does
    # not depend on the standard.
    case $family:$std:$file:$BRIEF$* in
    gcc:c17:*/implementation:1 | gcc:c17:*/implementation: | gcc:c++17:*/implementation: | \
        gcc:c++20:*/rows.cpp:)
        how="-O2 -S -o /dev/null"
        ;;
    *) how=-fsyntax-only ;;
    esac
    # shellcheck disable=SC2086 # lists of options
    if "$(compiler "$family-$language")" -x "$language" -std="$std" $how $warn -Werror "$@" -I. \
        -pthread "$file" \
        >"$log" 2>&1; then
        echo "ok   $what"
    else
        { echo "FAIL $what"; head -n 30 "$log" | sed 's/^/     /'; } >"$scratch/report"
        cat "$scratch/report"
    fi
    exit 0
fi

# The modes of the headers, as files. (The implementation of spdl_cuda.h: check_cuda.sh.)
modes=$scratch/modes
mkdir "$modes"
printf '#include "%s"\n' spdl.h spdl_cuda.h >"$modes/declaration"
printf '#define SPDL_IMPLEMENTATION\n#include "spdl.h"\n' >"$modes/implementation"
printf '#define SPDL_STATIC\n' | cat - "$modes/implementation" >"$modes/static"

# of FAMILY STANDARD: those that this run is about
of() {
    case ${BRIEF:+$1:$2} in
    gcc:c99 | gcc:c++11 | gcc:c++20 | gcc:c++ | clang:c17 | clang:c++17 | clang:c) false ;;
    esac
}

{
    for family in gcc clang; do
        for mode in declaration implementation static; do
            for std in c99 c17; do of $family $std && echo "$family c $std $modes/$mode"; done
            for std in c++11 c++17 c++20; do
                of $family $std && echo "$family c++ $std $modes/$mode"
            done
        done
        for switch in $(grep -o 'SPDL_NO_[A-Z_]*' spdl.h | sort -u); do
            of $family c && echo "$family c c11 $modes/implementation -D$switch"
            of $family c++ && echo "$family c++ c++17 $modes/implementation -D$switch"
        done
        both="-DSPDL_NO_NPZ -DSPDL_NO_REPORT"
        for switches in "" -DSPDL_NO_NPZ -DSPDL_NO_REPORT "$both" -DSPDL_NO_THREADS; do
            of $family c && echo "$family c gnu17 tests/switches.c $switches"
            of $family c++ && echo "$family c++ c++17 tests/switches.c $switches"
        done
        for mode in declaration implementation static; do
            for less in "$both" "$both -DSPDL_NO_THREADS"; do
                of $family c && echo "$family c c99 $modes/$mode $less"
                of $family c++ && echo "$family c++ c++11 $modes/$mode $less"
            done
        done
        of $family c && echo "$family c gnu11 $modes/implementation -DSPDL_OS_POSIX"
        of $family c++ && echo "$family c++ gnu++17 $modes/implementation -DSPDL_OS_POSIX"
        for define in _POSIX_C_SOURCE=200809L _XOPEN_SOURCE=700 _GNU_SOURCE; do
            of $family c17 && echo "$family c gnu17 $modes/implementation -D$define"
            of $family c99 && echo "$family c c99 $modes/implementation -D$define"
        done
        [ $family = gcc ] || [ -z "$BRIEF" ] || continue
        for file in examples/*.c examples/*/*.c bench/*.c tests/selftest/*.c tests/fuzz_*.c; do
            with=
            case $file in
            examples/mpi_*)
                with=$(mpicc --showme:incdirs 2>/dev/null | sed 's/[^ ]*/-isystem &/g')
                [ -n "$with" ] || continue # check_examples.sh says that it is skipped
                ;;
            esac
            [ -f "$file" ] && echo "$family c gnu17 $file $with"
        done
        for file in examples/*.cpp examples/*/*.cpp; do
            [ -f "$file" ] && echo "$family c++ c++17 $file"
            [ -f "$file" ] && echo "$family c++ c++20 $file"
        done
        echo "$family c++ gnu++17 tests/main.c"
        for std in c++11 c++14 c++17 c++20; do
            echo "$family c++ $std tests/rows.cpp"
            echo "$family c++ $std tests/cpp.cpp"
        done
        echo "$family c++ c++11 tests/cpp.cpp -fno-exceptions"
    done
} | sed "s/ *$//" >"$scratch/jobs" # xargs would take a blank at the end for a line that goes on

xargs -P "$(getconf _NPROCESSORS_ONLN)" -L 1 "$0" --one <"$scratch/jobs" >"$scratch/results"
grep -v '^ok ' "$scratch/results" | sed "s:$modes/::"
passed=$(grep -c '^ok ' "$scratch/results")
failed=$(($(wc -l <"$scratch/jobs") - passed))
finish
