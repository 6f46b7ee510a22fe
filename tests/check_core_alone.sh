#!/bin/sh
# The section >>ring-core of spdl.h compiles alone: cut out between its tag and the next one, with
# no header but the three freestanding ones and without a warning. That is what a model checker
# takes. tests/core_alone.c defines the helpers it asks for, and runs it through both modes.
. "$(dirname "$0")/tally.sh"
: "${WARN_C:?run this by make check-core-alone}"

# From the tag to the line above the next one.
awk '/^\/\* =+ \*\/$/ { rule = $0; next }
    /^\/\* >>/ { on = $2 == ">>ring-core" }
    on { print }' spdl.h >"$scratch/ring_core.inc"
check "spdl.h has a section >>ring-core" [ "$(wc -l <"$scratch/ring_core.inc")" -gt 100 ]

grep -n '^#[[:space:]]*include' "$scratch/ring_core.inc" >"$scratch/includes"
empty "the ring core includes something" "$scratch/includes"
grep -nE '__atomic|__sync|__asm|volatile|_Atomic' "$scratch/ring_core.inc" >"$scratch/builtins"
empty "the ring core goes past the helpers" "$scratch/builtins"

# compile CC STD: only the headers that come with the compiler can be found
compile() {
    own=$("$1" -print-file-name=include)
    # shellcheck disable=SC2086 # a list of options
    "$1" -std="$2" -ffreestanding -nostdinc -isystem "$own" -O2 $WARN_C -Werror \
        -I"$scratch" -c -o "$scratch/core.o" tests/core_alone.c
}

for cc in gcc clang; do
    for std in c99 c11 c17; do check "$cc -std=$std: compile" compile "$cc" "$std"; done
    check "$cc: link" "$cc" -o "$scratch/core" "$scratch/core.o"
    check "$cc: run" "$scratch/core"
done
finish
