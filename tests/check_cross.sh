#!/bin/sh
# Other processors: builds the tests with Debian's cross compilers, links them statically and runs
# them under qemu-user; s390x is big-endian, and check_bigendian.sh reads npz files on it. qemu
# translates and does not reorder memory accesses: this shows that the code works there, not that
# its orders suffice.
#
# Then a look at what runs when an item goes through an SPSC ring. qemu tells which instructions a
# program executes; those that ran once per item are the fast path, wherever the compiler put them.
# On x86-64 none may be locked or a fence; elsewhere each side has the one release store (or the
# one light fence in front of it) that hands over the slot, and nothing stronger. That rests on
# membarrier(2). Without it every push and pop has a full fence, and the look must see that too.
# With BRIEF=1, as in `make check`, the rings alone.
# usage: tests/check_cross.sh [ARCH ...]
#        tests/check_cross.sh --missing ARCH   the packages that it needs and that are not there
. "$(dirname "$0")/tally.sh"
modules="core ring"
more="alloc pool pipeline" # on one of each byte order
# A thread that was joined stays in /proc for a moment, under qemu for longer: these would see it.
not_here="pool\.(threads_are_named|thread_that_fails_ends|init_that_fails_ends)"
logs=build/cross

# about ARCH: the prefix of its compiler, its name in package names, and its instructions as
# patterns: what a fast path must not have, and what hands over the slot (once a side).
about() {
    prefix=$1-linux-gnu- libc=$1 strong='' release=''
    case $1 in
    x86_64)
        libc=amd64
        strong=' lock | [lms]fence| xchg .*\('
        ;;
    aarch64)
        libc=arm64
        strong=' d[ms]b | casa?l? | (ldadd|ldset|swp)| ldax?r | stlxr '
        release=' stlr '
        ;;
    riscv64)
        strong=' fence( i?o?rw,i?o?rw)?$| (lr|sc|amoadd|amoor)\.'
        release=' fence i?o?rw,o?w$'
        ;;
    ppc64le)
        prefix=powerpc64le-linux-gnu- libc=ppc64el
        strong=' (hw)?sync$| l[wd]arx | st[wd]cx'
        release=' lwsync$'
        ;;
    s390x) strong=' br? %r0$| b[a-z]*r %r0$| csy? | csg | la[anox]g? ' ;;
    *) return 1 ;;
    esac
}

# missing ARCH: the packages that it needs and that are not there
missing() {
    about "$1"
    command -v "${prefix}gcc" >/dev/null || echo "gcc-${prefix%-}" | tr _ -
    [ -f "/usr/${prefix%-}/lib/libc.a" ] || [ -f "/usr/lib/${prefix%-}/libc.a" ] ||
        echo "libc6-dev-$libc-cross"
    command -v "qemu-$1" >/dev/null || echo qemu-user
}

if [ "$1" = --missing ]; then
    missing "$2"
    exit
fi

# --- tests ---

# run_under_qemu ARCH RUNNER [ARGUMENT ...]: the tests that stdin names
run_under_qemu() {
    qemu=qemu-$1
    shift
    STRESS=brief TEST_TIMEOUT=120 xargs "$qemu" "$@"
}

# One job: builds the runner of an ARCH, and runs what can run under qemu. A thread may wait long
# for its turn there. What fails is run once more with the same seed, which is told.
if [ "$1" = --one ]; then
    about "$2"
    runner=build/${prefix}gcc/runner
    case $2$BRIEF in
    aarch64) modules="$modules $more" ;;
    s390x) modules="$modules $more" ;;
    esac
    for module in $modules; do
        sources="$sources tests/test_$module.c"
    done
    {
        MAKEFLAGS='' "${MAKE:-make}" -s CC="${prefix}gcc" WERROR=1 LDFLAGS=-static \
            CFLAGS='-O1 -DTEST_SANITIZED=1' TESTS="$sources tests/stress_ring.c" "$runner" &&
            "qemu-$2" "$runner" --list | grep -E "^($(echo "$modules" | tr ' ' '|')|stress)\." |
            grep -vE "$not_here" | run_under_qemu "$2" "$runner"
    } >"$logs/$2.log" 2>&1
    seed=$(sed -n 's/^seed \([0-9]*\).*/\1/p' "$logs/$2.log")
    sed -n 's/^FAIL \([a-z0-9_.]*\):.*/\1/p' "$logs/$2.log" >"$logs/$2.failed"
    [ ! -s "$logs/$2.failed" ] ||
        run_under_qemu "$2" "$runner" --seed "$seed" <"$logs/$2.failed" >"$logs/$2.again" 2>&1
    exit 0
fi

# tests_of ARCH: adds up what the job has written
tests_of() {
    closing=$(grep -E '^[0-9]+ passed, [0-9]+ failed' "$logs/$1.log" | tail -n 1 | tr -d ,)
    if [ -n "$closing" ]; then
        # shellcheck disable=SC2086 # the words of the closing line
        set -- "$1" $closing
        again=0
        [ ! -s "$logs/$1.failed" ] || again=$(grep -c '^ok ' "$logs/$1.again")
        passed=$((passed + $2 + again))
        failed=$((failed + $4 - again))
        if [ "$again" -eq 0 ]; then again_text=; else again_text=", $again more in a second run"; fi
        echo "$1: $2 tests$again_text"
        [ "$4" -eq 0 ] || sed -n "/^seed/,\$ { /^ok /d; s/^/     $1: /p; }" "$logs/$1.log"
        [ "$4" -eq "$again" ] || sed "s/^/     $1, again: /" "$logs/$1.again"
    else
        not_ok "$1: the tests"
        tail -n 20 "$logs/$1.log" | sed 's/^/     /'
    fi
}

# --- instructions ---

items=4000 # more than anything at start and end repeats

# executed ARCH PROGRAM CASE: the instructions that ran for each item
executed() {
    about "$1"
    one=-singlestep # its name up to qemu 8
    "qemu-$1" -help 2>&1 | grep -q one-insn-per-tb && one=-one-insn-per-tb
    "qemu-$1" $one -d exec,nochain -D "$scratch/trace" "$2" "$3" $items || return 1
    sed -n 's/^Trace.*\[[^/]*\/0*\([0-9a-f]*\)\/.*/\1/p' "$scratch/trace" |
        awk -v least=$((items * 9 / 10)) '
            { ++ran[$1] } END { for (at in ran) if (ran[at] >= least) print at }' |
        sort >"$scratch/addresses"
    "${prefix}objdump" -d --no-show-raw-insn "$2" |
        sed -n 's/^ *\([0-9a-f]*\):[[:space:]]*/\1 /p' | sort |
        join "$scratch/addresses" - | tr -s '\t ' '  ' | sed 's/ *$//'
}

# clean SIDES: what was executed has no strong instruction, and one release for each side
clean() {
    [ -s "$scratch/executed" ] || return 1
    ! grep -E "$strong" "$scratch/executed" || return 1
    [ -z "$release" ] && return
    found=$(grep -cE "$release" "$scratch/executed")
    [ "$found" -eq "$1" ] || { echo "$found of '$release', not $1"; return 1; }
}

has_strong() {
    grep -qE "$strong" "$scratch/executed"
}

# build PROGRAM OPTION ...
build() {
    program=$scratch/$1
    shift
    "${prefix}gcc" -O2 -static -pthread "$@" -o "$program" tests/budget_ring.c
}

look_at() {
    about "$1"
    check "$1: build" build asymmetric
    check "$1: build without membarrier" build fenced -DSPDL__OS_BARRIER=0
    if ! "qemu-$1" "$scratch/asymmetric" asymmetric 1; then
        skip "$1: instructions: membarrier(2) is not available here"
        return
    fi
    executed "$1" "$scratch/asymmetric" spsc_push >"$scratch/executed"
    check "$1: an SPSC push has a strong instruction" clean 1
    counts="$(wc -l <"$scratch/executed") push"
    executed "$1" "$scratch/asymmetric" spsc_pop >"$scratch/executed" # and a push before
    check "$1: an SPSC pop has a strong instruction" clean 2
    echo "$1: instructions with their loops: $counts, $(wc -l <"$scratch/executed") push and pop"
    executed "$1" "$scratch/fenced" spsc_push >"$scratch/executed"
    check "$1: the fence of a push without membarrier is not seen" has_strong
}

# --- all ---

mkdir -p "$logs"
[ $# -gt 0 ] || set -- x86_64 aarch64 riscv64 ppc64le s390x
for arch; do
    about "$arch" || { echo "usage: $0 [x86_64] [aarch64] [riscv64] [ppc64le] [s390x]"; exit 2; }
    needs=$(missing "$arch" | tr '\n' ' ')
    if [ -n "$needs" ]; then
        skip "$arch: apt-get install $needs"
    else
        echo "$arch" >>"$scratch/archs"
    fi
done
[ -s "$scratch/archs" ] || finish
grep -v x86_64 "$scratch/archs" |
    xargs -P "$(getconf _NPROCESSORS_ONLN)" -I ARCH "tests/check_cross.sh" --one ARCH
while IFS= read -r arch; do
    [ "$arch" = x86_64 ] || tests_of "$arch"
    look_at "$arch"
done <"$scratch/archs"
finish
