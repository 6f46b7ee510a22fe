#!/bin/sh
# The implementation in three units of one program: one exports it, two have it for themselves; or
# with --shared in two shared libraries and the program, each with its own.
# usage: tests/matrix_units.sh [--shared] FOLDER
shared=
[ "$1" != --shared ] || { shared=1 && shift; }
mkdir -p "$1" || exit 1
cat >"$1/unit.c" <<'C'
#define SPDL_IMPLEMENTATION
#include "spdl.h"
SPDL_FN(numbers, void, void) {
    *out = (void *)(uintptr_t)(spdl_sequence(task) + 1);
    return spdl_sequence(task) < 100 ? SPDL_OK : SPDL_END;
}
int UNIT(void);
int UNIT(void) {
    spdl_pipeline_desc desc = { 0 };
    spdl_pipeline *p;
    void *item;
    int sum = 0;
    desc.workers = 2;
    if (spdl_pipeline_create(&p, &desc, SPDL_STAGES(SPDL_SOURCE(numbers), SPDL_SINK(3))) != SPDL_OK)
        return -1;
    while (spdl_pipeline_next(p, &item, SPDL_FOREVER) == SPDL_OK) sum += (int)(uintptr_t)item;
    spdl_pipeline_destroy(p);
    return sum;
}
C
cat >"$1/main.c" <<'C'
int one(void);
int two(void);
int three(void);
int main(void) { return one() != 5050 || two() != 5050 || three() != 5050; }
C
cc="${CC:-cc} -I. -Wall -Wextra -Werror -O0"
for unit in one two three; do
    own=-DSPDL_STATIC
    [ $unit != one ] && [ -z "$shared" ] || own=
    # shellcheck disable=SC2086 # lists of options
    if [ -n "$shared" ]; then
        $cc -fPIC -shared -DUNIT=$unit '-DSPDL_API=extern __attribute__((visibility("hidden")))' \
            "$1/unit.c" -o "$1/lib$unit.so" -lpthread || exit 1
    else
        $cc $own -DUNIT=$unit -c "$1/unit.c" -o "$1/$unit.o" || exit 1
    fi
done
# shellcheck disable=SC2086 # a list of options
if [ -n "$shared" ]; then
    $cc -DUNIT=three -c "$1/unit.c" -o "$1/three.o" &&
        $cc "$1/main.c" "$1/three.o" -L"$1" -Wl,-rpath,"$(realpath "$1")" -lone -ltwo -lpthread \
            -o "$1/program" || exit 1
else
    $cc "$1/main.c" "$1"/one.o "$1"/two.o "$1"/three.o -lpthread -o "$1/program" || exit 1
fi
timeout 60 "$1/program"
