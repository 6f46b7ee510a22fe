#!/bin/sh
# What the sections of spdl.h from crc to write cost a program at -O2, as one number.
# usage: bench/npz_size.sh compile_ms | code_kb
cd "$(dirname "$0")/.." || exit 1
scratch=$(mktemp -d) || exit 1
trap 'rm -rf "$scratch"' EXIT
: "${CC:=cc}"

# The program with all of the header, and without those sections.
printf '#define SPDL_IMPLEMENTATION\n#include "all.h"\n' >"$scratch/all.c"
printf '#define SPDL_IMPLEMENTATION\n#include "without.h"\n' >"$scratch/without.c"
cp spdl.h "$scratch/all.h"
awk '/^\/\* >>/ { skip = /^\/\* >>(crc|inflate|lanes|split|file|zip|npy|npz|many|write)-impl/ }
     /^#endif \/\* SPDL_IMPLEMENTATION/ { skip = 0 }
     !skip' spdl.h >"$scratch/without.h"

compile() {
    $CC -O2 -w -c "$scratch/$1.c" -o "$scratch/$1.o" || exit 1
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
