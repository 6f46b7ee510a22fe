#!/bin/sh
# perf on examples/trace.c: threads and stages have their names in what it records. With a folder as
# its argument everything is kept there and shown: `make flamegraph`. Where perf is missing or not
# permitted it says so and skips.
[ -z "$1" ] || mkdir -p "$1" || exit 1
keep=$1
[ -z "$keep" ] || keep=$(cd "$keep" && pwd)
. "$(dirname "$0")/tally.sh"
at=${keep:-$scratch}

give_up() {
    skip "$*"
    finish
}

command -v perf >/dev/null 2>&1 || give_up "perf is missing (Debian: linux-perf)"
check "build examples/trace.c" ${CC:-cc} -O1 -g -fno-omit-frame-pointer -I. examples/trace.c \
    -o "$at/trace" -lpthread
[ -x "$at/trace" ] || finish
perf record -q -g -o "$at/perf.data" "$at/trace" "$at/trace.json" >"$at/perf.log" 2>&1 || {
    tail -n 3 "$at/perf.log"
    give_up "perf may not record here: needs kernel.perf_event_paranoid of at most 2, or root"
}
perf report -i "$at/perf.data" --stdio -g none --no-children --percent-limit 1 \
    >"$at/report.txt" 2>/dev/null
perf script -i "$at/perf.data" >"$at/stacks.txt" 2>/dev/null

# The reader sleeps nearly all the time, and so is in few samples or none.
for stage in decode_image sum_images; do
    check "no stage '$stage' in the stacks" grep -q "$stage" "$at/stacks.txt"
done
check "no stage 'decode_image' in the report" grep -q 'loader-[0-3].*decode_image' "$at/report.txt"
check "no call chain from the pool to a stage" awk '
    /decode_image/ { stage = 1 } /spdl__worker_main/ && stage { found = 1 } /^$/ { stage = 0 }
    END { exit !found }' "$at/stacks.txt"

if [ -n "$keep" ]; then
    grep -v '^#' "$at/report.txt" | grep -v '^$' | head -n 20
    echo "perf report -i $at/perf.data"
    folded=$(command -v stackcollapse-perf.pl) && drawn=$(command -v flamegraph.pl) &&
        "$folded" "$at/stacks.txt" | "$drawn" >"$at/flamegraph.svg" && echo "$at/flamegraph.svg"
    [ -n "$drawn" ] || echo "flamegraph.pl (github.com/brendangregg/FlameGraph) in the PATH draws" \
        "$at/stacks.txt; profiler.firefox.com opens it as it is"
fi
finish
