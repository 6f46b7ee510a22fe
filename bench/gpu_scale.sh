#!/bin/sh
# Part `scale` of bench/gpu.sh: what more processors bring to the benches of pipelines. A bench has
# as many workers as it may use processors (sched_getaffinity), so taskset sets both.
#     SCALE_CPUS="1 2 4 8 15" SCALE_SECONDS=130 bench/gpu_scale.sh
# A line for each row: its name, the value for each number of processors, the gain over the first.
# bench_pipeline has 2 workers at least, also on one processor.
cd "$(dirname "$0")/.." || exit 1
cpus=${SCALE_CPUS:-1 2 4 8 15}
limit=${SCALE_SECONDS:-130}
rows=${SCALE_ROWS:-jpeg_rate work10us noop3_ordered scale_10us scale_100us}
folder=${SCALE_FOLDER:-build}
here=$(nproc)
began=$(date +%s)
mkdir -p "$folder"
: >"$folder/scale.json"
for row in $rows; do
    all=
    case $row in scale_*) all=--all ;; esac
    for n in $cpus; do
        [ "$n" -le "$here" ] || continue
        [ $(($(date +%s) - began)) -lt "$limit" ] || { echo "stopped after $limit s" >&2; break 2; }
        last=$((n - 1))
        # shellcheck disable=SC2086 # nothing, or an option
        timeout -k 5 60 taskset -c "0-$last" build/bench/bench_pipeline --json --quick $all "$row" \
            2>/dev/null | grep '"case"' | sed "s/^{/{\"cpus\":$n,/" >>"$folder/scale.json"
    done
done
python3 - "$folder/scale.json" <<'P'
import json, sys
table = {}
for line in open(sys.argv[1]):
    row = json.loads(line)
    if "ours" in row:
        table.setdefault((row["case"], row.get("unit", "")), {})[row["cpus"]] = row["ours"]
for (case, unit), of in table.items():
    first = min(of)
    cells = []
    for n in sorted(of):
        if unit == "%" or not of[first] or not of[n]:
            cells.append(f"{n}: {of[n]:.4g}")  # is a share already
            continue
        gain = of[n] / of[first] if unit.endswith("/s") else of[first] / of[n]
        cells.append(f"{n}: {of[n]:.4g} ({gain:.2f}x)")
    print(f"{case:22} {unit:8}", "  ".join(cells))
P
