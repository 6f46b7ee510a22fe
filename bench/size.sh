#!/bin/sh
# What including the header costs: the processor time of compiling it, least of 3, and the text of
# the object (code and constants); that of the program, where rows are few and unused sections go.
# Two headers are compared, interleaved, if a second one is named.
# usage: bench/size.sh [OTHER_SPDL_H]
cd "$(dirname "$0")/.." || exit 1
cc=${CC:-cc}
scratch=$(mktemp -d) || exit 1
sections="" other=""
trap 'rm -rf "$scratch"' EXIT

cat >"$scratch/whole.c" <<'END'
#define SPDL_IMPLEMENTATION
#include "spdl.h"
END
printf '#define SPDL_NO_NPZ\n#define SPDL_NO_REPORT\n' |
    cat - "$scratch/whole.c" >"$scratch/least.c"
printf '#define SPDL_STATIC\n' | cat - examples/quickstart.c >"$scratch/quickstart.c"
printf '#include "spdl.h"\n' >"$scratch/declarations.c"
cat >"$scratch/rows.c" <<'END'
#define SPDL_STATIC
#define SPDL_NO_NPZ
#define SPDL_NO_REPORT
#ifndef WITH_THREADS
#define SPDL_NO_THREADS
#endif
#define SPDL_IMPLEMENTATION
#include "spdl.h"
#include <stdlib.h>
SPDL_FN(count, void, int) {
    if (spdl_sequence(task) == 10) return SPDL_END;
    if ((*out = malloc(sizeof(int))) == NULL) return SPDL_E_NOMEM;
    **out = (int)spdl_sequence(task);
    return SPDL_OK;
}
SPDL_FN(twice, int, int) {
    *in *= 2;
    *out = in;
    return SPDL_OK;
}
int main(void) {
    spdl_pipeline_desc desc = { 0 };
    spdl_pipeline *p;
    int *n, sum = 0;
    if (spdl_pipeline_create(&p, &desc, SPDL_STAGES(
            SPDL_SOURCE(count, .free_item = free), SPDL_PIPE(twice),
            SPDL_SINK(3))) != SPDL_OK) return 1;
    while (SPDL_NEXT(p, &n, SPDL_FOREVER) == SPDL_OK) {
        sum += *n;
        free(n);
    }
    spdl_pipeline_destroy(p);
    return sum != 90;
}
END
{ echo '#define WITH_THREADS' && cat "$scratch/rows.c"; } >"$scratch/rows_threads.c"
cat >"$scratch/ring_pool.c" <<'END'
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "spdl.h"
static void job(void *arg, int worker, void *local) {
    (void)worker;
    (void)local;
    spdl_ring_push((spdl_ring *)arg, &arg, SPDL_FOREVER);
}
int main(void) {
    spdl_ring_desc ring_desc = { 0 };
    spdl_pool_desc pool_desc = { 0 };
    spdl_ring *ring;
    spdl_pool *pool;
    void *item;
    ring_desc.capacity = 4;
    pool_desc.workers = 2;
    if (spdl_ring_create(&ring, &ring_desc) != SPDL_OK) return 1;
    if (spdl_pool_create(&pool, &pool_desc) != SPDL_OK) return 1;
    spdl_pool_submit(pool, job, ring, SPDL_FOREVER);
    spdl_ring_pop(ring, &item, SPDL_FOREVER);
    spdl_pool_destroy(pool);
    spdl_ring_close(ring);
    spdl_ring_destroy(ring, NULL, NULL);
    return 0;
}
END

# compile FOLDER PROGRAM OPTION: seconds on the processor, and in $scratch/PROGRAM.o the object
compile() {
    # shellcheck disable=SC2086 # options
    { LC_ALL=C bash -c 'TIMEFORMAT=%U; time "$@"' - "$cc" "$3" $sections -I"$1" \
        -c "$scratch/$2.c" -o "$scratch/$2.o"; } 2>&1
}

# bytes PROGRAM: the text of the object, or of the program where sections are cut
bytes() {
    if [ -n "$sections" ]; then
        "$cc" -Wl,--gc-sections "$scratch/$1.o" -o "$scratch/$1" -lpthread || return
        size "$scratch/$1"
    else
        size "$scratch/$1.o"
    fi | awk 'END { print $1 }'
}

# least PROGRAM OPTION WHAT: a line with the least time and the text for each header
least() {
    : >"$scratch/times"
    for _ in 1 2 3; do
        for folder in . ${other:+"$other"}; do
            rm -f "$scratch/$1.o"
            seconds=$(compile "$folder" "$1" "$2" | tail -n 1)
            [ ! -e "$scratch/$1.o" ] || echo "$folder $seconds $(bytes "$1")" >>"$scratch/times"
        done
    done
    awk -v what="$3" -v option="$2" -v other="$other" '
        !($1 in least) || $2 < least[$1] { least[$1] = $2 }
        { text[$1] = $3 }
        END {
            printf "%-44s %-4s %6.2f s %7.1f KB", what, option, least["."], text["."] / 1000
            if (other != "" && !(other in least)) printf "   the other does not compile"
            else if (other != "" && least[other] > 0)
                printf "   %.2f and %.2f of the other, %.2f s %.1f KB", least["."] / least[other],
                       text[other] ? text["."] / text[other] : 0, least[other], text[other] / 1000
            printf "\n"
        }' "$scratch/times"
}

# linked PROGRAM OPTION WHAT: the same for a whole program without what it does not use
linked() {
    sections="-ffunction-sections -fdata-sections"
    least "$@"
    sections=
}

if [ $# -gt 0 ]; then
    other=$scratch/other
    mkdir "$other" && cp "$1" "$other/spdl.h" || exit 1
fi
"$cc" --version | head -n 1
least whole -O2 "everything"
least least -O2 "with SPDL_NO_NPZ and SPDL_NO_REPORT"
least quickstart -O2 "examples/quickstart.c with SPDL_STATIC"
linked rows_threads -Os "a program of three rows"
linked rows -Os "a program of three rows, no threads"
least ring_pool -Os "rings and a pool with SPDL_STATIC"
least declarations -O2 "declarations"
wc -l spdl.h | awk '{ print $1, "lines" }'
