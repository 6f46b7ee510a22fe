#!/bin/sh
# Checks the models of who sleeps and who wakes, and that each model still finds the fault when a
# part of the protocol is taken out. One line for each: states, seconds, verdict.
# usage: tests/model/run.sh [WORD ...]     only models with such a word in their line
cd "$(dirname "$0")" || exit 1
if ! command -v spin >/dev/null || ! command -v gcc >/dev/null; then
    echo "skip model: needs spin and gcc"
    echo "0 passed, 0 failed, 1 skipped"
    exit 0
fi

work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM
passed=0
failed=0
wanted=" $* "

# is_wanted LINE: whether one of the words given is in it
is_wanted() {
    [ "$wanted" = "  " ] && return 0
    for word in $wanted; do
        case $1 in *"$word"*) return 0 ;; esac
    done
    return 1
}

# COLLAPSE keeps the search exhaustive; one that runs out of depth or memory counts as failed.
# model EXPECTED NAME [SWITCH ...]: EXPECTED is holds or breaks
model() {
    expected=$1
    name=$2
    shift 2
    is_wanted "$expected $name $*" || return
    optimise=-O1
    [ "$expected" = breaks ] && optimise=-O0 # found at once
    rm -f "$work"/*
    cp ./*.pml "$work"
    (
        cd "$work" &&
            spin "$@" -a "$name.pml" &&
            gcc "$optimise" -w -DSAFETY -DCOLLAPSE -DMEMLIM=3500 -o pan pan.c &&
            ./pan -m100000
    ) >"$work/log" 2>&1
    errors=$(sed -n 's/.*errors: \([0-9]*\).*/\1/p' "$work/log")
    states=$(sed -n 's/ *\([0-9e.+]*\) states, stored.*/\1/p' "$work/log")
    seconds=$(sed -n 's/.*elapsed time \([0-9.]*\) seconds/\1/p' "$work/log")
    if grep -Eq 'max search depth too small|MEMLIM|out of memory' "$work/log"; then
        verdict="not searched"
    elif [ "$errors" = 0 ]; then
        verdict=holds
    elif grep -Eq 'assertion violated.*(asleep|inside|returned|taken)' "$work/log"; then
        verdict=breaks
    else
        verdict="not searched"
    fi
    mark="ok "
    if [ "$verdict" = "$expected" ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        mark=BAD
    fi
    printf '%s %-6s %-46s %9s states %6s s\n' "$mark" "$verdict" "$name $*" \
        "${states:-?}" "${seconds:-?}"
    if [ "$mark" = BAD ]; then sed 's/^/    /' "$work/log" | cut -c 1-300 | tail -n 20; fi
}

model holds park
model holds park -DMEET
model holds park -DWORKERS=3 -DPARKED
model holds park -DTWO_CLIENTS -DPARKED
model holds park -DTWO_CLIENTS -DPARKED -DWORKERS=3
model holds event -DNO_FIRST_TRY
model holds event -DNO_CLOSE
model holds next -DTICKETS=2
model holds next -DNO_STOP
model holds stop

model breaks park -DNO_HEAVY
model breaks park -DPARKED -DITEMS=3 -DNO_CLEAR
model breaks park -DPARKED -DNO_CLEAR_AFTER
model breaks park -DPARKED -DITEMS=3 -DLATE_WORD
model breaks park -DPARKED -DNO_CLAIM_HINT
model breaks park -DMEET -DNO_CLAIM_HINT
model breaks park -DPARKED -DNO_RECHECK
model breaks park -DNO_LOOK_FENCE
model breaks park -DTWO_CLIENTS -DPARKED -DOWN_HINT
model breaks event -DNO_CLOSE -DNO_HEAVY
model breaks event -DNO_CLOSE -DNO_RECHECK
model breaks event -DNO_CLOSE -DLATE_WORD
model breaks event -DNO_CLOSE -DNO_PASS_ON
model breaks event -DNO_PUSH_WAKES
model breaks next -DTICKETS=2 -DNO_STOP -DNO_HEAVY
model breaks next -DTICKETS=2 -DNO_STOP -DNO_RECHECK
model breaks next -DTICKETS=2 -DNO_STOP -DNO_RELOOK
model breaks stop -DNO_LOCK
model breaks stop -DEARLY_LOOK
model breaks stop -DLATE_WORD

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
