#!/bin/sh
# Checks the models of who sleeps, who wakes and who closes, and that each model still finds the
# fault when a part of the protocol is taken out: one line for each, with states, seconds, verdict.
# At the same time runs the explorer on rings and pipelines of spdl.h itself, if it is given.
# usage: tests/model/run.sh [--explorer PROGRAM]... [--long] [WORD ...]
#     WORD    only models with such a word; holds: what is there; small: broken ones of a second
#     --long  larger settings, too: minutes, and up to 4 GB each
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
long=no
if [ "${1-}" = --long ]; then
    long=yes
    shift
fi
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
claims='asleep|inside|value|passed|returned|taken|late|result|settled|told|gone|waits'
claims="$claims|ticket|calls|freed|pushed|where|fate|over|next|failed|blocked|due|seen|stopped"
claims="$claims|tail|head|old|at!=|refunds|touched|stopping|got|sleepers"

# Most searches are over sooner than a compiler has optimised them: `large` ones, of more than a
# million states, are worth it. COLLAPSE takes half the memory and half as long again. The search is
# exhaustive either way: one that runs out of depth or memory counts as failed.
cheap="gcc -O0"
! command -v clang >/dev/null || cheap="clang -O0" # in half the time
compile=$cheap
collapse=
[ "$long" = no ] || collapse=-DCOLLAPSE

# search FOLDER EXPECTED NAME [SWITCH ...]: EXPECTED is holds or breaks
search() {
    folder=$1
    expected=$2
    name=$3
    shift 3
    cp ./*.pml "$folder"
    (
        cd "$folder" &&
            spin "$@" -a "$name.pml" &&
            $compile -w -DSAFETY $collapse -DMEMLIM=3500 -o pan pan.c &&
            ./pan -m1000000
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

large() {
    compile="gcc -O1"
    model "$@"
    compile=$cheap
}

# small NAME [SWITCH ...]: a model that breaks within a second
small() {
    is_wanted "small breaks $*" || return
    words=$wanted
    wanted="  "
    model breaks "$@"
    wanted=$words
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

full="-DPARKED -DCAP0=1 -DCAP1=1"
late="-DLAST -DITEMS=5 -DLIM2=2 -DCAP2=4"
large holds sit -DITEMS=1
large holds sit $full -DITEMS=3
large holds sit $full -DITEMS=3 -DPAIRS
model holds sit $late -DROOMS=1
model holds sit $late -DROOMS=2
model holds sit -DHOLES -DITEMS=2 -DNO_SLEEP -DHOLE=0 -DCAP1=1 -DLIM1=1
large holds marks -DITEMS=2 -DFLUSH
large holds marks -DITEMS=1 -DEPOCHS -DLIM2=2
model holds branch -DITEMS=2
model holds branch -DITEMS=2 -DCOMPLETION
model holds rewind -DREWINDS=2
large holds rewind -DINSIDE
large holds rewind -DSTOPS=2
large holds parked -DITEMS=1
large holds parked -DAGAIN -DITEMS=1
model holds leave
large holds grow
model holds quiet
model holds quiet -DALONE
large holds turn -DITEMS=1
large holds push -DITEMS=2 -DNO_CLOSE
large holds push -DDROP -DNO_CLOSE
large holds push -DREADY -DITEMS=2 -DNO_CLOSE
large holds event -DNO_CLOSE
large holds wait_mpmc -DNO_CLOSE -DNO_TIMEOUT
large holds wait_mpmc -DNO_CLOSE -DNO_TIMEOUT -DCAPACITY=2
model holds wait_mpmc -DNO_CLOSE -DPUSHERS=1 -DBATCH=2 -DCAPACITY=2
model holds wait_mpmc -DNO_CLOSE -DPUSHERS=1 -DBATCH=2 -DCAPACITY=2 -DWAKE_ONE
model holds wait_mpmc -DPUSHERS=1 -DPOPPERS=1 -DBATCH=2
model holds wait_mpmc -DPUSHERS=1 -DPOPPERS=1 -DBATCH=2 -DFENCE
large holds wait_mpmc -DPUSHERS=2 -DPOPPERS=1 -DNO_TIMEOUT
model holds next -DNO_STOP
model holds works -DALONE
large holds works -DNO_GUEST
large holds works -DNO_GUEST -DASIDE
model holds next -DREADY -DTICKETS=2 -DNO_STOP
large holds loader -DBATCHES=1
large holds loader -DLIVES=1
if [ "$long" = yes ]; then
    large holds sit
    large holds sit -DHOLES -DITEMS=3 -DNO_SLEEP -DHOLE=0 -DCAP1=1 -DLIM1=1
    large holds marks -DITEMS=3
    large holds marks -DITEMS=2 -DEPOCHS -DBLOCK
    large holds marks -DITEMS=1 -DEPOCHS -DFLUSH
    large holds marks -DITEMS=2 -DSTOPS -DNO_HOLES
    large holds marks -DITEMS=1 -DEPOCHS -DSTOPS
    large holds marks -DITEMS=1 -DEPOCHS -DREWINDS
    large holds marks -DITEMS=1 -DSTOPS -DREWINDS -DNO_HOLES
    large holds branch
    large holds branch -DCOMPLETION
    large holds rewind -DREWINDS=2 -DINSIDE
    large holds rewind -DREWINDS=2 -DSTOPS=2
    large holds push -DDROP -DITEMS=2
    large holds parked -DAGAIN -DROOMS=1 -DLIM=2
    large holds parked
    large holds parked -DLIM=2
    large holds parked -DAGAIN
    large holds sit -DNO_SLEEP
    large holds sit -DNO_SLEEP -DITEMS=3
    large holds push -DITEMS=2
    large holds push -DNO_CLOSE
    large holds push -DLIM=1
    large holds push -DREADY -DITEMS=2
    large holds push -DREADY -DNO_CLOSE
    large holds push -DREADY -DLIM=1
    large holds next
    large holds turn
    large holds next -DTICKETS=2
    large holds next -DREADY -DTICKETS=2
    large holds event -DNO_FIRST_TRY
    large holds works
    large holds marks -DITEMS=2 -DLIM2=2 -DHANG
    large holds loader -DBATCHES=2
    large holds loader
    large breaks push -DLIM=1 -DSILENT_CLOSE
    large breaks push -DREADY -DLIM=1 -DSILENT_CLOSE
    large breaks push -DDROP -DITEMS=2 -DBLIND_DROP
    large breaks sit -DHOLES -DITEMS=3 -DNO_SLEEP -DHOLE=0 -DCAP1=1 -DLIM1=1 -DLATE_DROPPED
    large breaks sit $full -DITEMS=4 -DROOMS=2 -DNO_SLEEP -DLIM1=1 -DNO_PREV
fi

for mutant in NO_NEXT NO_TAKE_HINT NO_TAKE_FENCE EARLY_SLEEPERS \
    EARLY_LOOK; do
    large breaks sit -DNO_SLEEP "-D$mutant"
done
for mutant in NO_ALL NO_LEAVE_HINT NO_CLEAR_AFTER NO_WRAP LATE_FED PLAIN_WAITING DEAF_ROOM; do
    model breaks sit $full -DITEMS=3 "-D$mutant"
done
for mutant in NO_RECHECK LATE_WORD NO_TRAINER_LOOK; do
    large breaks sit $full -DITEMS=3 "-D$mutant"
done
large breaks sit $full -DITEMS=3 -DPAIRS -DNO_CLEAR_AFTER
model breaks sit $late -DROOMS=2 -DNO_WAIT_HINT
model breaks sit $late -DROOMS=1 -DNO_ASK_HINT
model breaks sit -DHOLES -DITEMS=2 -DNO_SLEEP -DHOLE=0 -DCAP1=1 -DLIM1=1 -DNO_UNDO_HINT
model breaks marks -DITEMS=2 -DEPOCHS -DNO_WAIT
large breaks marks -DITEMS=1 -DEPOCHS -DLIM2=2 -DNO_EXCL
model breaks marks -DITEMS=1 -DWAKE_EARLY
large breaks marks -DITEMS=2 -DREWINDS -DHEADS_BACK
model breaks marks -DITEMS=1 -DREWINDS -DOLD_BASE
model breaks marks -DITEMS=1 -DREWINDS -DPURGE_EARLY
model breaks marks -DITEMS=1 -DEPOCHS -DFLUSH -DOLD_FLUSHED
model breaks marks -DITEMS=1 -DFLUSH -DTWO_STEPS
model breaks marks -DITEMS=1 -DFLUSH -DFLUSH_FAIL
model breaks marks -DITEMS=2 -DSHUT_FIRST
large breaks marks -DITEMS=2 -DCAP2=2 -DNO_SHUT_PASS
large breaks marks -DITEMS=2 -DFAIL_AT_END
model breaks marks -DITEMS=2 -DLIM2=2 -DHANG -DLAST_PUTS
for mutant in NO_HOLE LOST_DROP ANY_PATH BY_NUMBER; do
    small branch -DITEMS=2 "-D$mutant"
done
for mutant in ONE_MARK ABOVE_ALONE LATE_FAIL BY_NUMBER; do
    small branch -DITEMS=2 -DCOMPLETION "-D$mutant"
done
model breaks branch -DLATE_FAIL
model breaks branch -DNO_WAIT
for mutant in NO_AGAIN NO_LAST_LOOK CLEARS_STOP KEEPS_STOP NO_KEEPER NO_LOOK SHUT_FIRST SILENT \
    EARLY_WAKE LATE_WORD; do
    small rewind "-D$mutant"
done
small rewind -DSTOPS=2 -DNO_SHUT
for mutant in NO_ROOM_LOOK NO_PARK_QUIET NO_DROP LATE_RELEASE; do
    model breaks parked -DAGAIN "-D$mutant"
done
large breaks parked -DAGAIN -DITEMS=1 -DNO_PARK_HINT
large breaks parked -DNO_GENERATION
for mutant in BLIND_RETURN SILENT_COMPLETE SILENT_DONE LATE_WORD NO_COMPLETING; do
    model breaks parked -DITEMS=1 "-D$mutant"
done
small event -DNO_CLOSE -DNO_HEAVY
small event -DNO_CLOSE -DNO_RECHECK
small event -DNO_CLOSE -DLATE_WORD
small event -DNO_CLOSE -DNO_PASS_ON
small event -DNO_PUSH_WAKES
model breaks wait_mpmc -DNO_CLOSE -DNO_TIMEOUT -DNO_HEAVY
model breaks wait_mpmc -DNO_CLOSE -DNO_TIMEOUT -DNO_RECHECK
model breaks wait_mpmc -DNO_CLOSE -DNO_TIMEOUT -DLATE_WORD
model breaks wait_mpmc -DNO_CLOSE -DNO_TIMEOUT -DCAPACITY=2 -DNO_PASS_ON
model breaks wait_mpmc -DNO_CLOSE -DPUSHERS=1 -DBATCH=2 -DCAPACITY=2 -DWAKE_ONE -DNO_PASS_ON
model breaks wait_mpmc -DNO_CLOSE -DPUSHERS=1 -DBATCH=2 -DNO_LAST_TRY
model breaks wait_mpmc -DPUSHERS=1 -DBATCH=2 -DNO_TIMEOUT -DCLOSE_WAKES_ONE
model breaks wait_mpmc -DPUSHERS=2 -DPOPPERS=1 -DNO_TIMEOUT -DNO_MARK
for mutant in PLAIN_WAITING NO_PUT_FENCE NO_RECHECK LATE_FED OWN_TICKET NO_END_HINT; do
    model breaks next -DTICKETS=2 -DNO_STOP "-D$mutant"
done
for mutant in PLAIN_WAITING NO_PUT_FENCE NO_RECHECK OWN_TICKET NO_END_HINT UNCOUNTED KEEPS_COUNT \
    LATE_WORD; do
    model breaks next -DREADY -DTICKETS=2 -DNO_STOP "-D$mutant"
done
model breaks next -DREADY -DTICKETS=2 -DSILENT_STOP
model breaks next -DREADY -DTICKETS=2 -DEARLY_STOP
model breaks next -DTICKETS=2 -DSILENT_STOP
model breaks next -DTICKETS=2 -DEARLY_STOP
for mutant in SILENT_GUEST NO_PUT_FENCE NO_RECHECK PLAIN_WAITING LATE_FED; do
    model breaks works -DALONE "-D$mutant"
done
for mutant in SILENT_JOB SILENT_OVER; do
    model breaks works -DNO_GUEST "-D$mutant"
done
model breaks works -DNO_GUEST -DASIDE -DNO_LEAVE_HINT
for mutant in NO_LOOK ONE_STATE BLIND_RETURN LATE_QUIT SILENT_QUIT NO_RECHECK LATE_WORD \
    NO_REFERENCE; do
    small leave "-D$mutant"
done
for mutant in NO_GROWING NO_STARTING NO_SECOND NO_WAIT SILENT_QUIT NO_RECHECK LATE_COUNT BLIND \
    NO_LOCK; do
    small grow "-D$mutant"
done
for mutant in NO_SECOND_LOOK PLAIN_BIT NO_STIR LATE_STIR NO_PUT_FENCE; do
    small quiet "-D$mutant"
done
small quiet -DALONE -DNO_WAKE_ALL
for mutant in NO_RECHECK LATE_CLEAR LATE_WORD NO_PUT_FENCE; do
    model breaks turn -DITEMS=1 "-D$mutant"
done
for mutant in PLAIN_WAITING NO_RECHECK LATE_WORD EARLY_HINT NO_PUSH_FENCE NO_END_HINT; do
    model breaks push -DITEMS=2 -DNO_CLOSE "-D$mutant"
done
for mutant in PLAIN_WAITING NO_RECHECK LATE_WORD EARLY_HINT NO_PUSH_FENCE NO_END_HINT UNCOUNTED \
    KEEPS_COUNT TAKES_TWICE; do
    model breaks push -DREADY -DITEMS=2 -DNO_CLOSE "-D$mutant"
done
model breaks push -DREADY -DITEMS=2 -DLIM=1 -DLATE_COUNT
for mutant in PLAIN_DROP NEEDS_PLACE; do
    model breaks push -DDROP -DNO_CLOSE "-D$mutant"
done
for mutant in NO_PUT_FENCE NO_RECHECK LATE_WORD EARLY_STAMP LATE_HOLD NO_RECOUNT NO_RELEASE \
    GONE_LAST SILENT_START; do
    model breaks loader -DBATCHES=2 "-D$mutant"
done
model breaks loader -DLIVES=1 -DNO_DONE_FENCE

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
