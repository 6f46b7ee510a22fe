#!/bin/sh
# Checks the models of who sleeps, who wakes and who closes, and that each model still finds the
# fault when a part of the protocol is taken out: one line for each, with states, seconds, verdict.
# At the same time runs the explorer on the rings of spdl.h itself, if it is given.
# usage: tests/model/run.sh [--explorer PROGRAM]... [WORD ...]     only models with such a word
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
count=0
said=0
jobs=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
explorers=
while [ "${1-}" = --explorer ]; do
    explorers="$explorers $2"
    shift 2
done
wanted=" $* "

# is_wanted LINE: whether one of the words given is in it
is_wanted() {
    [ "$wanted" = "  " ] && return 0
    for word in $wanted; do
        case $1 in *"$word"*) return 0 ;; esac
    done
    return 1
}

# What the assertions speak of: another one that fails is a mistake in the model.
claims='asleep|inside|returned|taken|late|result|settled|told|gone|waits'

# COLLAPSE keeps the search exhaustive; one that runs out of depth or memory counts as failed.
# search FOLDER EXPECTED NAME [SWITCH ...]: EXPECTED is holds or breaks
search() {
    folder=$1
    expected=$2
    name=$3
    shift 3
    optimise=-O1
    [ "$expected" = breaks ] && optimise=-O0 # found at once
    cp ./*.pml "$folder"
    (
        cd "$folder" &&
            spin "$@" -a "$name.pml" &&
            gcc "$optimise" -w -DSAFETY -DCOLLAPSE -DMEMLIM=3500 -o pan pan.c &&
            ./pan -m100000
    ) >"$folder/log" 2>&1
    errors=$(sed -n 's/.*errors: \([0-9]*\).*/\1/p' "$folder/log")
    states=$(sed -n 's/ *\([0-9e.+]*\) states, stored.*/\1/p' "$folder/log")
    seconds=$(sed -n 's/.*elapsed time \([0-9.]*\) seconds/\1/p' "$folder/log")
    if grep -Eq 'max search depth too small|MEMLIM|out of memory' "$folder/log"; then
        verdict="not searched"
    elif [ "$errors" = 0 ]; then
        verdict=holds
    elif grep -Eq "assertion violated.*($claims)" "$folder/log"; then
        verdict=breaks
    else
        verdict="not searched"
    fi
    mark="ok "
    [ "$verdict" = "$expected" ] || mark=BAD
    printf '%s %-6s %-64s %9s states %6s s\n' "$mark" "$verdict" "$name $*" \
        "${states:-?}" "${seconds:-?}"
    if [ "$mark" = BAD ]; then sed 's/^/    /' "$folder/log" | cut -c 1-300 | tail -n 20; fi
    rm -rf "$folder"
}

# As many lines are in this pipe as models may begin.
mkfifo "$work/places" || exit 1
exec 3<>"$work/places"
while [ "$jobs" -gt 0 ]; do
    echo >&3
    jobs=$((jobs - 1))
done

# model EXPECTED NAME [SWITCH ...]: as many at a time as there are processors
model() {
    is_wanted "$*" || return
    read -r _ <&3
    mkdir "$work/$count"
    {
        search "$work/$count" "$@" >"$work/under_way.$count"
        mv "$work/under_way.$count" "$work/said.$count"
        echo >&3
    } &
    count=$((count + 1))
    tell
}

# Prints what those that have ended said, in order.
tell() {
    while [ -e "$work/said.$said" ]; do
        cat "$work/said.$said"
        if grep -q '^ok ' "$work/said.$said"; then
            passed=$((passed + 1))
        else
            failed=$((failed + 1))
        fi
        said=$((said + 1))
    done
}

for program in $explorers; do
    "$program" --runs "${RUNS:-5000}"
    [ $? -le 1 ] || echo "0 passed, 1 failed" # it broke off
done >"$work/explored" 2>&1 &

model holds park
model holds park -DMEET
model holds park -DWORKERS=3 -DPARKED
model holds park -DQUICK
model holds park -DQUICK -DFED=1 -DBUFFER=1
model holds park -DFED=1 -DITEMS=3
model holds park -DTWO_CLIENTS -DPARKED
model holds park -DTWO_CLIENTS -DPARKED -DWORKERS=3
model holds event -DNO_FIRST_TRY
model holds event -DNO_CLOSE
model holds wait_mpmc -DNO_CLOSE -DNO_TIMEOUT
model holds wait_mpmc -DNO_CLOSE -DNO_TIMEOUT -DCAPACITY=2
model holds wait_mpmc -DNO_CLOSE -DPUSHERS=1 -DBATCH=2 -DCAPACITY=2
model holds wait_mpmc -DNO_CLOSE -DPUSHERS=1 -DBATCH=2 -DCAPACITY=2 -DWAKE_ONE
model holds wait_mpmc -DPUSHERS=1 -DPOPPERS=1 -DBATCH=2
model holds wait_mpmc -DPUSHERS=1 -DPOPPERS=1 -DBATCH=2 -DFENCE
model holds wait_mpmc -DPUSHERS=2 -DPOPPERS=1 -DNO_TIMEOUT
model holds close_spsc
model holds close_spsc -DFENCE
model holds close_spsc -DCAPACITY=1
model holds close_spsc -DCAPACITY=1 -DCOMMIT
model holds close_spsc -DBATCH=2
model holds close_spmc
model holds close_spmc -DFENCE
model holds close_spmc -DCAPACITY=1 -DPUSHES=2 -DCONSUMERS=1
model holds next -DTICKETS=2
model holds next -DNO_STOP
model holds stop
model holds push
model holds push -DCAPACITY=2 -DITEMS=4
model holds deferred
model holds crews
model holds crews -DINLINE
model holds chain
model holds chain -DFREELY
model holds chain -DROOM=1 -DITEMS=4
model holds chain -DGROUP=1 -DITEMS=4

model breaks park -DNO_HEAVY
model breaks park -DPARKED -DITEMS=3 -DNO_CLEAR
model breaks park -DPARKED -DNO_CLEAR_AFTER
model breaks park -DPARKED -DITEMS=3 -DLATE_WORD
model breaks park -DPARKED -DNO_CLAIM_HINT
model breaks park -DMEET -DNO_CLAIM_HINT
model breaks park -DPARKED -DNO_RECHECK
model breaks park -DNO_LOOK_FENCE
model breaks park -DPARKED -DLATE_FENCE
model breaks park -DPARKED -DITEMS=3 -DSTAYS_KNOWN
model breaks park -DTWO_CLIENTS -DPARKED -DOWN_HINT
model breaks park -DFED=1 -DITEMS=3 -DNO_LOOK_FENCE
model breaks park -DFED=1 -DBUFFER=1 -DNO_TAKE_HINT
model breaks park -DQUICK -DQUICK_HANGS
model breaks park -DFED=1 -DITEMS=3 -DLEAVES
model breaks event -DNO_CLOSE -DNO_HEAVY
model breaks event -DNO_CLOSE -DNO_RECHECK
model breaks event -DNO_CLOSE -DLATE_WORD
model breaks event -DNO_CLOSE -DNO_PASS_ON
model breaks event -DNO_PUSH_WAKES
model breaks wait_mpmc -DNO_CLOSE -DNO_TIMEOUT -DNO_HEAVY
model breaks wait_mpmc -DNO_CLOSE -DNO_TIMEOUT -DNO_RECHECK
model breaks wait_mpmc -DNO_CLOSE -DNO_TIMEOUT -DLATE_WORD
model breaks wait_mpmc -DNO_CLOSE -DNO_TIMEOUT -DCAPACITY=2 -DNO_PASS_ON
model breaks wait_mpmc -DNO_CLOSE -DPUSHERS=1 -DBATCH=2 -DCAPACITY=2 -DWAKE_ONE -DNO_PASS_ON
model breaks wait_mpmc -DNO_CLOSE -DPUSHERS=1 -DBATCH=2 -DNO_LAST_TRY
model breaks wait_mpmc -DPUSHERS=1 -DBATCH=2 -DNO_TIMEOUT -DCLOSE_WAKES_ONE
model breaks wait_mpmc -DPUSHERS=2 -DPOPPERS=1 -DNO_TIMEOUT -DNO_MARK
model breaks close_spsc -DNO_HEAVY
model breaks close_spsc -DNO_CLOSE_HEAVY
model breaks close_spsc -DEARLY_CLOSED
model breaks close_spsc -DNO_END_FIRST
model breaks close_spsc -DNO_RETRACT
model breaks close_spsc -DNO_LIMIT
model breaks close_spsc -DLATE_LIMIT
model breaks close_spsc -DNO_LOOK_AGAIN
model breaks close_spsc -DNO_LAST_LOOK
model breaks close_spsc -DCOMMIT -DNO_COMMIT_LOOK
model breaks close_spmc -DNO_HEAVY
model breaks close_spmc -DNO_CLOSE_HEAVY
model breaks close_spmc -DEARLY_CLOSED
model breaks close_spmc -DNO_RETRACT
model breaks close_spmc -DBLIND
model breaks close_spmc -DCONSUMER_DECIDES
model breaks next -DTICKETS=2 -DNO_STOP -DNO_HEAVY
model breaks next -DTICKETS=2 -DNO_STOP -DNO_RECHECK
model breaks next -DTICKETS=2 -DNO_STOP -DNO_RELOOK
model breaks stop -DNO_LOCK
model breaks stop -DEARLY_LOOK
model breaks stop -DLATE_WORD
model breaks push -DNO_HEAVY
model breaks push -DNO_RECHECK
model breaks push -DLATE_WORD
model breaks push -DEARLY_NOTIFY
model breaks push -DSILENT_CLOSE
model breaks deferred -DNO_GENERATION
model breaks deferred -DNO_TELLING
model breaks deferred -DBLIND_RETURN
model breaks deferred -DNO_COMPLETING
model breaks deferred -DLATE_RELEASE
model breaks crews -DNO_HEAVY
model breaks crews -DNO_RECHECK
model breaks crews -DNO_CLAIM_HINT
model breaks crews -DNO_STEP_HINT
model breaks crews -DSILENT_HOLES
model breaks crews -DINLINE -DNO_HEAVY
model breaks crews -DINLINE -DNO_RECHECK
model breaks crews -DINLINE -DSILENT_HOLES
model breaks crews -DINLINE -DDEAF
model breaks chain -DNO_HEAVY
model breaks chain -DNO_RECHECK
model breaks chain -DNO_CLAIM_HINT
model breaks chain -DNO_PUT_HINT
model breaks chain -DNO_AGAIN_HINT
model breaks chain -DNO_CUT
model breaks chain -DGROUP=1 -DROOM=1 -DBLIND
model breaks chain -DGROUP=1 -DITEMS=4 -DBUSY
model breaks chain -DLEFT_CHAINED
model breaks chain -DNO_TAKEN

wait
tell
grep -Ev '^[0-9]+ passed, [0-9]+ failed' "$work/explored"
while read -r more _ bad _; do
    passed=$((passed + more))
    failed=$((failed + bad))
done <<END
$(sed -n 's/^\([0-9]*\) passed, \([0-9]*\) failed.*/\1 passed \2 failed/p' "$work/explored")
END
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
