#!/bin/sh
# What the NPZ part of spdl.h costs a program at -O2, as one number: with it, less without.
# usage: bench/npz_size.sh compile_ms | code_kb
cd "$(dirname "$0")/.." || exit 1
scratch=$(mktemp -d) || exit 1
trap 'rm -rf "$scratch"' EXIT
: "${CC:=cc}"

# usage: compile all | without
compile() {
    flag=
    [ "$1" = without ] && flag=-DSPDL_NO_NPZ
    printf '#define SPDL_IMPLEMENTATION\n#include "spdl.h"\n' |
        $CC -O2 -w -I. $flag -x c -c - -o "$scratch/$1.o" || exit 1
}

# Of CPU time: others may be at work.
milliseconds() {
    (compile "$1" && times) | awk -F '[ms ]+' 'NR == 2 {
        printf "%.0f\n", ($1 + $3) * 60000 + ($2 + $4) * 1000
    }'
}

bytes() {
    compile "$1"
    size "$scratch/$1.o" | awk 'NR == 2 { print $1 }'
}

case $1 in
compile_ms) echo $(($(milliseconds all) - $(milliseconds without))) ;;
code_kb) echo "$(bytes all) $(bytes without)" | awk '{ printf "%.1f\n", ($1 - $2) / 1024 }' ;;
*) exit 2 ;;
esac
