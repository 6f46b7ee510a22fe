#!/bin/sh
# What including the header costs: the processor time of compiling it, least of 3, and the text of
# the object (code and constants). Two headers are compared, interleaved, if a second one is named.
# usage: bench/size.sh [OTHER_SPDL_H]
cd "$(dirname "$0")/.." || exit 1
cc=${CC:-cc}
scratch=$(mktemp -d) || exit 1
trap 'rm -rf "$scratch"' EXIT

cat >"$scratch/whole.c" <<'END'
#define SPDL_IMPLEMENTATION
#include "spdl.h"
END
printf '#define SPDL_NO_NPZ\n#define SPDL_NO_REPORT\n' |
    cat - "$scratch/whole.c" >"$scratch/least.c"
printf '#define SPDL_STATIC\n' | cat - examples/quickstart.c >"$scratch/quickstart.c"
printf '#include "spdl.h"\n' >"$scratch/declarations.c"
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
    { LC_ALL=C bash -c 'TIMEFORMAT=%U; time "$@"' - "$cc" "$3" -I"$1" -c "$scratch/$2.c" \
        -o "$scratch/$2.o"; } 2>&1
}

# least PROGRAM OPTION: a line with the least time and the text for each header
least() {
    : >"$scratch/times"
    for _ in 1 2 3; do
        for folder in . ${other:+"$other"}; do
            seconds=$(compile "$folder" "$1" "$2")
            bytes=$(size "$scratch/$1.o" | awk 'END { print $1 }')
            echo "$folder $seconds $bytes" >>"$scratch/times"
        done
    done
    awk -v what="$3" -v option="$2" '
        !($1 in least) || $2 < least[$1] { least[$1] = $2 }
        { text[$1] = $3; if ($1 != ".") other = $1 }
        END {
            printf "%-44s %-4s %6.2f s %7.1f KB", what, option, least["."], text["."] / 1000
            if (other != "" && least[other] > 0)
                printf "   %.2f and %.2f of %s", least["."] / least[other],
                       text[other] ? text["."] / text[other] : 0, "the other"
            printf "\n"
        }' "$scratch/times"
}

if [ $# -gt 0 ]; then
    other=$scratch/other
    mkdir "$other" && cp "$1" "$other/spdl.h" || exit 1
fi
"$cc" --version | head -n 1
least whole -O2 "the implementation"
least least -O2 "with SPDL_NO_NPZ and SPDL_NO_REPORT"
least quickstart -O2 "examples/quickstart.c with SPDL_STATIC"
least ring_pool -Os "ring and pool with SPDL_STATIC"
least declarations -O2 "declarations"
wc -l spdl.h | awk '{ print $1, "lines" }'
