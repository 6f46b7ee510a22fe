#!/bin/bash
# Is every memory order, barrier, wake and check of the rings needed, and would we notice if it were
# missing? Each is taken out of a copy of spdl.h in turn: acquires and releases become relaxed,
# barriers and wakes go, and the rows of `logic` below are applied. What becomes of each copy:
#   explorer    tests/model/explore.c finds a fault (see there)
#   no barrier    the same on the barriers of systems without membarrier
#   tsan        the tests of rings, and their stress if it is there, fail under ThreadSanitizer
#   known       survives, for the reason given in `survivors`
# A survivor that is not in the list fails the run; so does a row that fits nothing any more.
# usage: tests/mutate_ring.sh [--list] [TEXT]     only mutants with the text in their line
# JOBS: how many at a time; RUNS: of the explorer, for each scenario; NO_TSAN=1: leaves that out
set -u
cd "$(dirname "$0")/.." || exit 1

# FUNCTION | TEXT | REPLACEMENT: the first place of the text in the function
logic='
spdl__os_futex_wake | spdl__add32(word, 1); | (void)0;
spdl__ring_wake | waiting & SPDL__RING_CLOSED ? SPDL__ALL : (int)n | (int)n
spdl__ring_wake | waiting & SPDL__RING_CLOSED ? SPDL__ALL : (int)n | 1
spdl_ring_close | &ring->pushes, SPDL__RING_WAITING | &ring->pushes, 1
spdl__mpmc_claim | (raw & SPDL__RING_MARK) == 0 | true
spdl__mpmc_claim | && seen == raw) return 0; | ) return 0;
spdl__mpmc_push_n | & SPDL__RING_MARK ? SPDL_CLOSED : SPDL_FULL | ? SPDL_FULL : SPDL_FULL
spdl__mpmc_pop_n | if (!spdl__ring_closed(ring)) return SPDL_EMPTY; | (void)0;
spdl__mpmc_pop_n | return at >= | return true || at >=
spdl__mpmc_pop_n | at + ring->index_mask + 1 | at + ring->index_mask + 2
spdl__ring_core_close | (void)spdl__or(&ring->tail, SPDL__RING_MARK) | (void)0
spdl__ring_core_close | ring->limit = 0; | (void)0;
spdl__ring_core_close | (void)spdl__or32(&ring->pops_waiting, SPDL__RING_CLOSED) | (void)0
spdl__spsc_push_n | if (spdl__ring_closed(ring)) return SPDL_CLOSED; | (void)0;
spdl__spsc_pop_n | closed = spdl__ring_closed(ring); | (void)0;
spdl__spsc_pop_n | return closed ? | return spdl__ring_closed(ring) ?
spdl__spsc_room | return spdl__min(n, ring->head_seen | return spdl__min(n, 1 + ring->head_seen
spdl__spsc_push_n | next + spdl__min(room, | next + 1 + spdl__min(room,
spdl__mpmc_at | < ring->capacity | <= ring->capacity
spdl__ring_quick_pop | head + ring->index_mask + 1 | head + 1
spdl__ring_sleep | &side->event, word, | &side->event, spdl__load32(&side->event.word),
spdl__ring_sleep | result = spdl__ring_attempt(call); | result = SPDL_EMPTY;
spdl__ring_sleep | spdl__sub32(side->waiting, 1); | (void)0;
spdl__ring_one | if (SPDL__UNLIKELY(waiting != 0)) | if (false)
'

# KEY | REASON
survivors='
spdl__mpmc_claim: load 2 | only compared; a claim loads the stamp again
spdl__mpmc_claim: logic 2 | full or empty a moment ago; one about to sleep looks after a barrier
spdl__mpmc_pop_n: load 1 | only compared, and acquired with CLOSED
spdl__ring_core_close: or 1 | the release of CLOSED comes after it
spdl__os_futex_wake: add32 1 | a thread that reads it does a heavy barrier before the next look
spdl__ring_inside: load 1 | counts are bounded whatever the pair; this one is only closer
spdl__ring_inside: load 2 | counts are bounded whatever the pair; this one is only closer
spdl__ring_inside: load 3 | only compared
spdl__ring_leave: store32 1 | SPDL_DEBUG only, orders nothing
spdl__ring_sleep: load32 1 | the heavy barrier after it acquires as well
spdl__ring_sleep: add32 1 | the heavy barrier comes after it
spdl__ring_sleep: sub32 1 | a number, nothing after it
spdl__ring_sleep: sub32 2 | a number, nothing after it
'

helpers='
#define SPDL__WEAK(type, suffix)                                                               \
    SPDL__PRIVATE type spdl__weak_load##suffix(const type *p) {                                \
        return __atomic_load_n(p, __ATOMIC_RELAXED);                                           \
    }                                                                                          \
    SPDL__PRIVATE void spdl__weak_store##suffix(type *p, type value) {                         \
        __atomic_store_n(p, value, __ATOMIC_RELAXED);                                          \
    }                                                                                          \
    SPDL__PRIVATE type spdl__weak_or##suffix(type *p, type value) {                            \
        return __atomic_fetch_or(p, value, __ATOMIC_RELAXED);                                  \
    }                                                                                          \
    SPDL__PRIVATE type spdl__weak_add##suffix(type *p, type value) {                           \
        return __atomic_fetch_add(p, value, __ATOMIC_RELAXED);                                 \
    }                                                                                          \
    SPDL__PRIVATE type spdl__weak_sub##suffix(type *p, type value) {                           \
        return __atomic_fetch_sub(p, value, __ATOMIC_RELAXED);                                 \
    }                                                                                          \
    SPDL__PRIVATE bool spdl__weak_cas##suffix(type *p, type *expected, type desired) {         \
        return __atomic_compare_exchange_n(p, expected, desired, false, __ATOMIC_RELAXED,      \
                                           __ATOMIC_RELAXED);                                  \
    }
SPDL__WEAK(uint32_t, 32)
SPDL__WEAK(uint64_t, )
#define SPDL__WEAK_NOTHING(...) ((void)0)'

region() { # the sections, with the functions of the event they use
    awk '/^\/\* >>os-linux/ { posix = 1 }
         /^\/\* >>ring-core/ { on = 1 } /^\/\* >>pool-impl/ { on = 0 }
         /^SPDL__PRIVATE void spdl__os_futex_wake\(.*{$/ && posix { wake = 1; posix = 0 }
         { print (on || wake) + 0 } /^}/ { wake = 0 }' spdl.h
}

# mutants [NUMBER]: lists them as NUMBER, KEY and line, tab-separated; with a number, the header
# with that one applied
mutants() {
    region | awk -v want="${1:-0}" -v logic="$logic" '
        function trim(s) { sub(/^ +/, "", s); sub(/ +$/, "", s); return s }
        # one mutant: text `from` at `at` of the line becomes `to`
        function mutant(rule, at, from, to,    key) {
            count++
            key = name ": " rule " " ++seen[name, rule]
            if (!want) printf "%d\t%s\t%s\n", count, key, trim($0)
            if (want == count) out = substr($0, 1, at - 1) to substr($0, at + length(from))
        }
        function everywhere(rule, from, to,    at, rest) {
            for (at = 0; (rest = index(substr($0, at + 1), from)) > 0;) {
                at += rest
                mutant(rule, at, from, to)
            }
        }
        function by_pattern(rule, pattern, to) {
            if (match($0, pattern)) mutant(rule, RSTART, substr($0, RSTART, RLENGTH), to)
        }
        BEGIN {
            rows = split(logic, row, "\n")
            for (i = 1; i <= rows; i++) {
                # a replacement may hold a bar
                if (split(row[i], part, / \| ?/) < 2) continue
                where[i] = trim(part[1])
                left[i] = part[2]
                right[i] = row[i]
                sub(/^[^|]*\| /, "", right[i])
                right[i] = trim(substr(right[i], length(left[i]) + 4))
            }
            orders = split("load load32 store store32 cas or or32 add add32 sub32", order, " ")
            wakes = split("ring_wake ring_hint os_event_wake ring_pass_on", woken, " ")
        }
        FNR == NR { inside[FNR] = $0; next }
        {
            out = $0
            if ($0 ~ /^\/\* >>os$/ && want) print helpers
        }
        !inside[FNR] { if (want) print; next }
        /^SPDL_.*\(/ { match($0, /spdl_[a-z_]*\(/); name = substr($0, RSTART, RLENGTH - 1) }
        {
            for (i = 1; i <= orders; i++)
                everywhere(order[i], "spdl__" order[i] "(", "spdl__weak_" order[i] "(")
            by_pattern("light", "spdl__barrier_light\\([^()]*\\)", "((void)0)")
            by_pattern("heavy", "spdl__barrier_heavy\\([^()]*\\)", "((void)0)")
            by_pattern("quick", "spdl__barrier_quick\\(\\)", "((void)0)")
            for (i = 1; i <= wakes && $0 !~ /^SPDL_/; i++)
                everywhere("wake", "spdl__" woken[i] "(", "SPDL__WEAK_NOTHING(")
            for (i = 1; i <= rows; i++)
                if (where[i] == name && !applied[i] && (at = index($0, left[i])) > 0) {
                    applied[i] = 1
                    mutant("logic", at, left[i], right[i])
                }
            if (want) print out
        }
        END {
            for (i = 1; i <= rows; i++)
                if (where[i] != "" && !applied[i]) {
                    print "a row of `logic` fits nothing:" row[i] > "/dev/stderr"
                    exit 1
                }
        }
    ' helpers="$helpers" - spdl.h
}

# build DIRECTORY: the explorer twice, on the header there
build() {
    for kind in "" -DSPDL__OS_BARRIER=0; do
        gcc -O1 -std=gnu11 -w -fsanitize=thread -U__SANITIZE_THREAD__ $kind \
            -c "$1/tests/model/explore_ring.c" -o "$1/ring$kind.o" &&
            gcc "$work/explore.o" "$1/ring$kind.o" -o "$1/explore$kind" || return 1
    done
}

tsan_fails() {
    (
        cd "$1" && objects=
        mkdir run-tsan
        for source in main test_ring stress_ring; do
            gcc -O1 -g -std=gnu11 -w -fsanitize=thread -pthread -c "tests/$source.c" \
                -o "$source.o" || exit 9
            objects="$objects $source.o"
        done
        # shellcheck disable=SC2086 # a list
        gcc -fsanitize=thread -pthread $objects -o run-tsan/runner -lm || exit 9
        STRESS=brief timeout 300 tests/run.sh run-tsan/runner ring stress
    ) >"$1/log.tsan" 2>&1
    status=$?
    [ "$status" -ne 0 ] && [ "$status" -ne 9 ]
}

# explored DIRECTORY PROGRAM: whether the explorer finds a fault; its words are left in `why`
explored() {
    timeout 300 "$1/$2" --first --runs "$RUNS" >"$1/log" 2>&1
    status=$?
    why=$(awk '/^BAD/ { sub(/^BAD +/, ""); sub(/  .*/, ""); name = $0; getline
                        sub(/^ +/, ""); sub(/;.*/, ""); print name ": " $0 }' "$1/log")
    if [ "$status" -eq 124 ]; then why="the explorer took too long"; fi
    [ "$status" -ne 0 ]
}

# judge NUMBER KEY: VERDICT NUMBER KEY, and the reason in a line of its own
judge() {
    copy=$work/$1
    mkdir -p "$copy/tests" && cp -r tests/model tests/*.[ch] tests/run.sh "$copy/tests/" &&
        mutants "$1" >"$copy/spdl.h"
    known=$(printf '%s\n' "$survivors" | awk -F ' [|] ' -v key="$2" '$1 == key { print $2 }')
    if ! build "$copy" >"$copy/log.build" 2>&1; then
        verdict=FAILED why="does not compile"
    elif explored "$copy" explore; then
        verdict=explorer
    elif explored "$copy" explore-DSPDL__OS_BARRIER=0; then
        verdict="no barrier"
    elif [ -n "$known" ]; then
        verdict=known why=$known
    elif [ -z "${NO_TSAN-}" ] && tsan_fails "$copy"; then
        verdict=tsan why=$(grep -m 1 -E 'data race|FAIL|^not ok' "$copy/log.tsan")
    else
        verdict=SURVIVES why=$(mutants | awk -F '\t' -v number="$1" '$1 == number { print $3 }')
    fi
    case $why in *"too long") verdict=FAILED ;; esac
    printf '%-10s %4s  %s\n                 %s\n' "$verdict" "$1" "$2" "$why"
    rm -rf "$copy"
}

RUNS=${RUNS:-30000}
if [ "${1-}" = --judge ]; then
    work=$2
    shift 2
    judge "$@"
    exit 0
fi
mutants >/dev/null || exit 1
wanted=${2-}
[ "${1-}" = --list ] || wanted=${1-}
list=$(mutants | grep -F -- "$wanted")
if [ "${1-}" = --list ]; then
    printf '%s\n' "$list"
    exit 0
fi

work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM
gcc -O2 -c tests/model/explore.c -o "$work/explore.o" || exit 1
mkdir -p "$work/0/tests" && cp -r tests/model "$work/0/tests/" && cp spdl.h "$work/0/"
if ! build "$work/0" || ! "$work/0/explore" --first --runs 1000 >"$work/log"; then
    echo "the header fails without any change"
    cat "$work/log"
    exit 1
fi
printf '%s\n' "$list" | cut -f 1,2 | tr '\t' '\n' |
    xargs -d '\n' -n 2 -P "${JOBS:-$(getconf _NPROCESSORS_ONLN)}" "$0" --judge "$work" |
    tee "$work/verdicts"
awk '
    /^[^ ]/ { total++ }
    /^explorer/ { explorer++ } /^no barrier/ { other++ } /^tsan/ { tsan++ }
    /^known/ { known++ } /^SURVIVES|^FAILED/ { bad++ }
    END {
        caught = explorer + other + tsan
        printf "%d mutants, %d caught (%.0f %%): explorer %d, without membarrier %d, tsan %d; ",
               total, caught, 100 * caught / total, explorer, other, tsan
        printf "%d survive for a known reason, ", known
        printf "so %.0f %% of those that matter are caught\n", 100 * caught / (total - known)
        printf "%d passed, %d failed\n", total - bad, bad
        exit bad > 0
    }' "$work/verdicts"
