#!/bin/sh
# Everything that CI runs: each part, what it took, and the sum of all tests in the last line. A
# part goes on after another has failed. The output of each part stays in build/check/. Lengths are
# those of a look at every case; `make torture` has the long ones.
# usage: tests/check.sh [PART ...]
cd "$(dirname "$0")/.." || exit 1
mkdir -p build/check
rm -f build/check/*.sum build/check/failures build/check/places
selected=" $* "

# sum LOG STATUS: the closing line of a part, as numbers; one that broke off counts as a failure
sum() {
    closing=$(grep -E '^[0-9]+ passed, [0-9]+ failed(, [0-9]+ skipped)?$' "$1" | tail -n 1)
    # shellcheck disable=SC2086 # the words of the closing line
    set -- "$1" "$2" ${closing:-0 passed, 0 failed}
    part_passed=$3
    part_failed=$5
    part_skipped=${7:-0}
    if [ "$2" -ne 0 ] && [ "$part_failed" -eq 0 ]; then part_failed=1; fi
    if [ "$2" -eq 0 ] && [ -z "$closing" ]; then part_failed=1; fi
}

# On a terminal there is no limit. A person can press Ctrl-C, which `timeout` would keep from make.
limit=
limit_s=600
if [ ! -t 0 ] && command -v timeout >/dev/null; then limit="timeout -k 10 $limit_s"; fi

# part NAME COMMAND ...: a part that hangs fails, and the others are run
part() {
    name=$1
    log=build/check/$name.log
    shift
    case $selected in
    "  " | *" $name "*) ;;
    *) return ;;
    esac
    start=$(date +%s)
    $limit "$@" >"$log" 2>&1 </dev/null
    status=$?
    if [ "$status" -ne 0 ] && [ -n "$limit" ] && [ $(($(date +%s) - start)) -ge $limit_s ]; then
        printf '\nFAIL %s: ended after %d s\n' "$name" $limit_s >>"$log"
    fi
    sum "$log" "$status"
    echo "$part_passed $part_failed $part_skipped" >"build/check/$name.sum"
    {
        printf '%-12s %4d passed, %d failed, %d skipped  %4d s\n' \
            "$name" "$part_passed" "$part_failed" "$part_skipped" $(($(date +%s) - start))
        grep 'in a second run$' "$log" | sed 's/^/    /'
        if [ "$part_failed" -gt 0 ]; then
            grep -vE '^ok |^make|(gcc|clang|\+\+) tests/[^ ]*\.c$' "$log" | sed 's/^/    /' |
                tail -n 60
            grep -E '(^|: +)FAIL ' "$log" | sed "s/^/$name: /" >>build/check/failures
        fi
    } >"build/check/$name.said"
    cat "build/check/$name.said"
}

# beside NAME COMMAND ...: a part that takes one processor, beside others of its kind
beside() {
    read -r _ <&3
    {
        part "$@"
        echo >&3
    } &
}

# Parts that use all processors run one after the other, and so do the tests, which look at times.
# AddressSanitizer sees all tests, ThreadSanitizer those with threads; both of clang, which needs a
# third of the time of gcc's (`make asan CC=gcc`), and they have found the same. Clang without a
# sanitizer, which found nothing that these did not, is in `make check-compilers`. A check that
# fails on a busy machine is run up to 20 times more, alone, and what came of it is told here.
files() { for name; do printf 'tests/test_%s.c ' "$name"; done; }
tests() { for name; do printf '%s. ' "$name"; done; }
# all_but MODULE ...: the files of the others; modules_but: their names
all_but() {
    for file in tests/test_*.c tests/stress_ring.c; do
        name=${file#tests/test_}
        case " $* cuda cuda_back cuda_fault cuda_sim " in
        *" ${name%.c} "*) ;;
        *) printf '%s ' "$file" ;;
        esac
    done
}
modules_but() {
    # shellcheck disable=SC2046 # a list
    sed -n 's/^TEST_TABLE(\([a-z_]*\)).*/\1/p' $(all_but "$@") | sort -u
}
MAKEFLAGS=$(printf '%s' "$MAKEFLAGS" | sed -e 's/ *-j[0-9]*//' -e 's/ *--jobserver-[a-z]*=[^ ]*//')
export MAKEFLAGS
make=${MAKE:-make}
part lint "$make" -s lint
part docs "$make" -s check-docs
part surface "$make" -s check-surface
part words "$make" -s check-words
part selftest "$make" -s selftest
part warnings env BRIEF=1 "$make" -s check-warnings # all compilers and standards: check-warnings
runs="--second 20 --jobs $(($(getconf _NPROCESSORS_ONLN) + 1))" # many tests sleep
# malloc hands out the address freed last, to whichever thread asks, as test_memory always does.
part gcc env GLIBC_TUNABLES=glibc.malloc.arena_max=1:glibc.malloc.tcache_count=0 \
    "$make" -s test CC=gcc WERROR=1 ARGS="$runs"
waits="core alloc pool lifetime next ready flow again rewind source defer push"
# shellcheck disable=SC2086,SC2046 # lists
part portable "$make" -s portable CC=clang CFLAGS="-O0 -g1" WERROR=1 ARGS="$runs" \
    TESTS="$(files $waits)" T="$(tests $waits)"
# Times are no matter of memory, and processes none of threads. What only waits is for
# ThreadSanitizer.
plain="contract headspace verdict flow guests next ready push pool"
# shellcheck disable=SC2086,SC2046 # lists
part asan "$make" -s asan CC=clang WERROR=1 ARGS="$runs" \
    TESTS="$(all_but $plain)" T="$(tests $(modules_but $plain)) npz_in_pieces."
threads="$waits contract guests ring debug pipeline rows batch branch fail mutants chance stats
    trace cache doctor report"
# shellcheck disable=SC2086 # a list
part tsan "$make" -s tsan CC=clang ARGS="$runs" T="$(tests $threads) stress npz.many" \
    TESTS="$(files $threads npz) tests/stress_ring.c"
part model "$make" -s model MODEL_ARGS="holds small" # `make model` breaks each in every way

# The others, the long ones first, with as many at a time as there are processors.
mkfifo build/check/places || exit 1
exec 3<>build/check/places
for _ in $(seq "$(getconf _NPROCESSORS_ONLN)"); do echo >&3; done
beside examples "$make" -s examples CC=clang CXX=clang++ EXAMPLE_FLAGS=-O0
beside cross env BRIEF=1 tests/check_cross.sh x86_64 aarch64 # others: `make cross`
beside matrix tests/matrix.sh --quick
beside cuda-clang "$make" -s test-cuda CUDA_TESTS=clang-tsan # clang-asan: `make test-cuda`
beside cuda env BRIEF=1 "$make" -s test-cuda CUDA_TESTS=compiles
beside fuzz "$make" -s check-fuzz CC=clang FUZZ_RUNS=3000
beside loader "$make" -s torture-loader CC=clang POINTS=8
beside headers env BRIEF=1 "$make" -s check-headers
beside hygiene "$make" -s check-hygiene
beside howto "$make" -s check-howto
beside messages "$make" -s check-messages
beside readme "$make" -s check-readme CC=gcc
beside packages "$make" -s check-packages CC=gcc
beside budget "$make" -s check-budget
beside numpy "$make" -s check-numpy CC=gcc
beside pages "$make" -s check-pages CC=gcc CXX=g++
beside bindings "$make" -s check-bindings CC=gcc
beside perf "$make" -s check-perf
beside report "$make" -s check-report CC=clang
beside core-alone "$make" -s check-core-alone
wait

[ ! -e build/check/failures ] || cat build/check/failures
# shellcheck disable=SC2046 # three numbers
set -- $(cat build/check/*.sum | awk '{ p += $1; f += $2; s += $3 } END { print p, f, s }')
if [ "$3" -gt 0 ]; then echo "$3 skipped: grep -h ^skip build/check/*.log"; fi
echo "$1 passed, $2 failed" | tee build/check/sum
[ "$2" -eq 0 ]
