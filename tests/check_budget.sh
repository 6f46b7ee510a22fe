#!/bin/sh
# How many instructions a push and a pop take, counted by callgrind: the same figure on every run,
# whatever else the machine does. The harness loop around the two calls is part of it. All are one
# item of 8 bytes by calls that need not wait, compiled by gcc -O2 with the implementation in the
# same file; clang is shown as well. More than the limit is a failure, more than the goal is told.
# usage: tests/check_budget.sh [--json]   rows like those of bench/bench.h instead
. "$(dirname "$0")/tally.sh"

# row, case of budget_ring.c, goal, limit
budgets="
    instructions_spsc        spsc_single  30  42
    instructions_spsc_burst  spsc_burst   30  39
    instructions_spsc_block  spsc_block   38  41
    instructions_mpmc        mpmc_single  36  52
    instructions_mpmc_burst  mpmc_burst   36  52
    instructions_mpmc_block  mpmc_block   44  53
"
pairs=6400
row_goal=160
row_limit=176

# refs PROGRAM ARGUMENT ...: instructions of the whole run
refs() {
    valgrind --tool=callgrind --callgrind-out-file=/dev/null "$@" 2>&1 |
        sed -n 's/.*Collected : *\([0-9]*\).*/\1/p'
}

# per_pair CASE: what does not depend on the count falls out
per_pair() {
    echo "$(refs "$scratch/budget" "$1" "$pairs") $(refs "$scratch/budget" "$1" $((2 * pairs)))" |
        awk -v pairs="$pairs" 'NF == 2 { printf "%.2f\n", ($2 - $1) / pairs }'
}

# per_row: what one more row costs an item
per_row() {
    echo "$(refs "$scratch/pipeline" 1 "$pairs") $(refs "$scratch/pipeline" 3 "$pairs")" |
        awk -v pairs="$pairs" 'NF == 2 { printf "%.2f\n", ($2 - $1) / 2 / pairs }'
}

under() {
    awk -v figure="$1" -v limit="$2" 'BEGIN { exit !(figure > 0 && figure <= limit) }'
}

# json ROW FIGURE GOAL
json() {
    printf '{"bench":"ring","case":"%s","ours":%s,"unit":"instr","goal":"<= %s instr"}\n' "$@"
}

# judge COMPILER ROW FIGURE GOAL LIMIT
judge() {
    if [ "$show" = json ]; then
        json "$2" "$3" "$4"
        return
    fi
    met=MISSED
    under "$3" "$4" && met=met
    printf '%-24s %6s instr  <= %s: %-6s  (%s)\n' "$2" "$3" "$4" $met "$1"
    case $1 in
    gcc*) check "$2: ${3:-no} instructions, more than $5" under "$3" "$5" ;;
    esac
}

show=text
[ "$1" = --json ] && show=json
if ! command -v valgrind >/dev/null; then
    skip "budget: apt-get install valgrind libc6-dbg"
    finish
fi
for cc in gcc clang; do
    command -v $cc >/dev/null || continue
    if ! $cc -O2 -pthread -o "$scratch/budget" tests/budget_ring.c ||
        ! $cc -O2 -pthread -o "$scratch/pipeline" tests/budget_pipeline.c -lm; then
        not_ok "budget: $cc does not compile it"
    elif ! "$scratch/budget" asymmetric 1; then
        skip "budget: membarrier(2) is not available here, so that there are no quick paths"
    else
        compiler="$cc $($cc -dumpversion)"
        echo "$budgets" | grep . >"$scratch/budgets"
        while read -r row case goal limit; do
            judge "$compiler" "$row" "$(per_pair "$case")" "$goal" "$limit"
        done <"$scratch/budgets"
    fi
    if [ "$show" = text ] && [ -x "$scratch/pipeline" ]; then
        compiler="$cc $($cc -dumpversion)"
        judge "$compiler" instructions_row "$(per_row)" $row_goal $row_limit
    fi
    [ "$show" = json ] && break
done
[ "$show" = json ] || finish
