#!/bin/sh
# The table "What you gain" of README.md, from what benches printed with --json (all rows in one
# file). A row whose case is not in the file stays as it is.
#   for b in pipeline sampler state; do make -s bench-$b JSON=1; done >build/figures.jsonl
#   bench/figures.sh build/figures.jsonl
cd "$(dirname "$0")/.." || exit 1
mkdir -p build
awk '
function field(name,   at) { # of the line of JSON
    if (!match($0, "\"" name "\":(\"[^\"]*\"|[^,}]*)")) return ""
    at = substr($0, RSTART, RLENGTH)
    sub(/^[^:]*:/, "", at)
    gsub(/"/, "", at)
    return at
}
function figure(value, unit) {
    sub(/us$/, "µs", unit)
    return sprintf(value < 10 ? "%.2g %s" : "%.0f %s", value, unit)
}
FNR == NR {
    name = field("case")
    ours[name] = figure(field("ours"), field("unit"))
    if (field("peer") != "")
        peer[name] = figure(field("peer"), field("unit")) ", " field("peer_name")
    next
}
/<!-- figures -->/ { on = 1 }
/<!-- \/figures -->/ { on = 0 }
on && match($0, /`[a-z0-9_.^]+`/) && substr($0, RSTART + 1, RLENGTH - 2) in ours {
    name = substr($0, RSTART + 1, RLENGTH - 2)
    split($0, cell, "|")
    $0 = "|" cell[2] "| " ours[name] " | " (name in peer ? peer[name] : "") " |"
}
{ print }' "${1:?usage: bench/figures.sh FILE.jsonl}" README.md >build/README.md &&
    cp build/README.md README.md
