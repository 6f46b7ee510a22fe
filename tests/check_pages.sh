#!/bin/sh
# Programs that somebody wrote who had read README.md, examples/HOWTO.md and the declarations of
# spdl.h, and nothing else. Each computes its answer a second time by a plain loop, and prints
# "right" or "WRONG". They run on the consumer's thread, on one worker, by default and on 64.
. "$(dirname "$0")/tally.sh"
printf '#define SPDL_IMPLEMENTATION\n#include "spdl.h"\n' >"$scratch/library.c"
${CC:-cc} -O1 -I. -c "$scratch/library.c" -o "$scratch/library.o" || exit 1
for program in tests/pages/*.c tests/pages/*.cpp; do
    name=${program##*/}
    case $name in
    *.cpp) compile="${CXX:-c++} -std=c++20" ;;
    *) compile="${CC:-cc} -std=gnu11" ;;
    esac
    # shellcheck disable=SC2086 # a compiler and its options
    if ! $compile -Wall -Wextra -Werror -O1 -I. "$program" "$scratch/library.o" \
        -o "$scratch/program" -lpthread -lm; then
        not_ok "$name does not compile"
        continue
    fi
    for workers in -1 1 0 64; do
        timeout 60 "$scratch/program" $workers >"$scratch/answer" 2>&1
        check "$name with workers = $workers: $(tail -n 1 "$scratch/answer")" \
            grep -q ': right$' "$scratch/answer"
    done
done
finish
