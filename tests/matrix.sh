#!/bin/bash
# Systems, processors, compilers: a line for each cell. It says whether tests ran there, a program
# was linked, or the header was compiled; a warning is a failure. A cell that fails runs once more,
# alone: its failed tests, or all of it. A tool that is missing is named. Python's tools (zig,
# wasmtime) go into build/matrix/venv, or come from $MATRIX_PYTHON.
# With SPDL_IN_CI=1 a cell that is not tried has failed, and those of --quick are left to their part
# of `make check`.
# usage: tests/matrix.sh [--quick | --long] [CELL ...]
#        tests/matrix.sh --missing    the packages that are not there
#   --quick: what takes seconds, and no test twice; --long: also cells that repeat another
# shellcheck disable=SC2086 # lists of words
cd "$(dirname "$0")/.." || exit 1
B=build/matrix
limit_s=900 # of a cell, where nobody can press Ctrl-C
mkdir -p $B
cells="mingw-x64 armhf i686 musl-x64 s390x riscv64 ppc64le mingw-examples mingw-x86 mingw-c++
    windows-arm64 macos-x64 freebsd netbsd openbsd wasm32 msvc-c17 msvc-c++17 gcc-c gcc-c++ clang-c
    clang-c++"
quick="macos-arm64 tcc musl-gcc msvc-c11 msvc-c++20 msvc-x86 msvc-arm64 gcc-c23 three-units
    shared-libraries"
long="musl-x86 musl-arm i686-sanitized"
few="core alloc pool pipeline"
many="$few ring rows lifetime next ready flow batch branch again rewind state source defer fail push
    contract mistakes mutants cache stats sampler inflate npz npz_file npz_write files tokens debug
    compare guests wait"
warnings="-Wall -Wextra -Werror"

# --- tools ---

tools="x86_64-w64-mingw32-gcc x86_64-w64-mingw32-g++ i686-w64-mingw32-gcc wine i686-linux-gnu-gcc
    arm-linux-gnueabihf-gcc riscv64-linux-gnu-gcc powerpc64le-linux-gnu-gcc s390x-linux-gnu-gcc
    qemu-arm qemu-riscv64 qemu-ppc64le qemu-s390x tcc musl-gcc clang clang++"

# packages TOOL: what it is in; a cross compiler needs a C library
packages() {
    case $1 in
    *-w64-mingw32-*) echo "${1##*-}-mingw-w64-${1%%-*}" | tr _ - ;;
    i686-*) echo gcc-i686-linux-gnu libc6-dev-i386-cross ;;
    arm-*) echo gcc-arm-linux-gnueabihf libc6-dev-armhf-cross ;;
    powerpc64le-*) echo gcc-powerpc64le-linux-gnu libc6-dev-ppc64el-cross ;;
    *-linux-gnu-gcc) echo "gcc-${1%-gcc}" "libc6-dev-${1%%-*}-cross" ;;
    qemu-*) echo qemu-user ;;
    musl-gcc) echo musl-tools ;;
    wine) echo wine wine64 ;;
    clang*) echo clang ;;
    *) echo "$1" ;;
    esac
}

have() {
    command -v "$1" >/dev/null || return
    case $1 in
    *-linux-gnu*-gcc) [ "$("$1" -print-file-name=libc.a)" != libc.a ] ;;
    esac
}

if [ "$1" = --missing ]; then
    for tool in $tools; do have "$tool" || packages "$tool"; done | tr ' ' '\n' | sort -u
    exit
fi

# --- what cells share: each ends with its line in `said` ---

say() { echo "$*" >"$B/$cell.said"; }

# need TOOL: ends the cell where there is none
need() {
    have "$1" && return
    say "not tried: no tool (apt-get install $(packages "$1"))"
    exit 0
}

need_python() {
    python=${MATRIX_PYTHON:-$B/venv/bin/python}
    "$python" -c "import $1" 2>/dev/null && return
    say "not tried: no tool (pip install $1)"
    exit 0
}

# modules NAME ...: what is built and run
modules() {
    tests=$(printf 'tests/test_%s.c ' "$@")
    names=$(printf '%s. ' "$@")
}

# build NAME COMPILER OPTION ...: a runner of $tests. Where a size has 32 bits the header has to be
# without a warning, and the tests, which count in 64 bits, do not.
build() {
    local out=$1 cc=$2 quiet=
    shift 2
    if echo __SIZEOF_POINTER__ | $cc -E -x c - | grep -qx 4; then
        quiet="-w -D_FILE_OFFSET_BITS=64" # the header defines that only where it comes first
        $cc -x c -std=gnu11 $warnings -Wconversion -DSPDL_IMPLEMENTATION -c spdl.h \
            -o "$B/$out.o" || return
    fi
    MAKEFLAGS='' "${MAKE:-make}" -s B="$B/$out" CC="$cc" WERROR=1 LDFLAGS=-static \
        CFLAGS="-O1 $* $quiet" TESTS="$tests" "$B/$out/runner"
}

# run COMMAND ...: the tests in $names, the second time those that failed the first time
run() {
    local sum passed=0 skipped=0 again=
    if [ -s "$B/$cell.failed" ]; then
        names=$(cat "$B/$cell.failed")
        passed=$(grep -c '^ok ' "$B/$cell.tests")
        skipped=$(grep -c '^skip ' "$B/$cell.tests")
        again=", in a second run: ${names//$'\n'/ }"
        cp "$B/$cell.tests" "$B/$cell.tests.first"
        echo "--- the first run:" && grep -v '^ok ' "$B/$cell.tests.first" && echo "--- the second:"
    fi
    TEST_TIMEOUT=${TEST_TIMEOUT:-120} "$@" $names </dev/null 2>&1 | tr -d '\r' >"$B/$cell.tests"
    sed -n 's/^FAIL \([a-z0-9_.]*\):.*/\1/p' "$B/$cell.tests" >"$B/$cell.failed"
    sum=$(grep -E '^[0-9]+ passed, [0-9]+ failed' "$B/$cell.tests" | tail -n 1)
    [ -n "$sum" ] || : >"$B/$cell.failed" # it broke off: all of them once more
    grep -v '^ok ' "$B/$cell.tests"
    set -- ${sum:-0 passed, 1 failed}
    if [ "$3" -eq 0 ] && [ $((passed + $1)) -gt 0 ]; then
        say "tests run: $((passed + $1)) passed, $((skipped + ${5:-0})) skipped$again"
    else
        say "FAILED: ${sum:-no sum}: $(tr '\n' ' ' <"$B/$cell.failed")"
    fi
}

# compiles COMPILER ... -- STANDARD ...: the implementation in every standard
compiles() {
    local command=()
    while [ "$1" != -- ]; do command+=("$1") && shift; done
    shift
    for std; do
        "${command[@]}" -std="$std" -I. $warnings -DSPDL_IMPLEMENTATION -fsyntax-only spdl.h ||
            { say "FAILED: $std" && return; }
    done
    say "compiled: $*"
}

# links COMPILER ...: the first example
links() {
    "$@" -std=c99 -I. -O1 $warnings examples/quickstart.c -o "$B/$cell.out" || return
    say linked
}

zig() {
    need_python ziglang
    "$python" -m ziglang cc -target "$@"
}

# clang as MSVC: its words, and declarations as Microsoft's (tests/msvc); no word of GNU C
msvc() {
    local triple=$1 language=$2 std=$3
    need clang
    {
        printf '#include <poison.h>\n#define SPDL_IMPLEMENTATION\n#include "spdl.h"\n'
        printf '#if defined(NOMINMAX) || defined(WIN32_LEAN_AND_MEAN)\n#error left behind\n#endif\n'
    } >"$B/$cell.c"
    clang --target="$triple-pc-windows-msvc" -x "$language" -std="$std" -fms-compatibility \
        -fms-extensions -fms-compatibility-version=19.40 -U__clang__ -ffreestanding \
        -nostdlibinc -isystem tests/msvc -I. -fsyntax-only $warnings -Wno-unused-function \
        "$B/$cell.c" || return
    say "compiled: $language $std, no GNU word"
}

# mingw PROCESSOR MODULE ...
mingw() {
    local compiler=$1-w64-mingw32-gcc
    shift
    need "$compiler"
    modules "$@"
    build "$cell" "$compiler" -D__USE_MINGW_ANSI_STDIO=1 -D_FILE_OFFSET_BITS=64 &&
        mv "$B/$cell/runner.exe" "$B/$cell/tests.exe"
}

use_wine() {
    need wine
    export WINEDEBUG=-all WINEPREFIX="$PWD/$B/wine"
}

# qemu CPU PREFIX MODULE ...
qemu() {
    local program=qemu-$1 prefix=$2
    shift 2
    need "$prefix-gcc"
    [ "$program" != qemu-i386 ] || program=
    [ -z "$program" ] || need "$program"
    modules "$@"
    build "$cell" "$prefix-gcc" -DTEST_SANITIZED=1 ${program:+-DTEST_EMULATED=1} $more &&
        run $program "$B/$cell/runner"
}

# musl TARGET PROGRAM MODULE ...: what the PROGRAM emulates, or ''
musl() {
    local target=$1 program=$2
    shift 2
    need_python ziglang
    [ -z "$program" ] || need "$program"
    modules "$@"
    build "$cell" "$python -m ziglang cc -target $target" -DTEST_SANITIZED=1 &&
        run $program "$B/$cell/runner"
}

# --- the cells ---

one() {
    cell=$1
    say "FAILED: $B/$cell.log"
    case $cell in
    mingw-x64)
        use_wine
        mingw x86_64 $many || return
        run wine "$B/$cell/tests.exe" --jobs 2
        ;;
    mingw-x86) mingw i686 $few && say linked ;;
    mingw-c++)
        need x86_64-w64-mingw32-g++
        x86_64-w64-mingw32-g++ -std=c++17 -O1 -I. -static $warnings tests/rows.cpp \
            -o "$B/$cell.exe" || return
        use_wine
        wine "$B/$cell.exe" </dev/null && say "tests run: 1 passed"
        ;;
    mingw-examples)
        need x86_64-w64-mingw32-g++
        use_wine
        x86_64-w64-mingw32-g++ -std=c++17 -O1 -I. -static $warnings examples/pipeline_cpp.cpp \
            -o $B/pipeline_cpp.exe && wine $B/pipeline_cpp.exe </dev/null || return
        for name in quickstart train_digits npz_info ring_spsc ring_batches game_thread; do
            x86_64-w64-mingw32-gcc -std=gnu11 -O1 -I. $warnings -D__USE_MINGW_ANSI_STDIO=1 \
                examples/$name.c -o $B/$name.exe || return
            argument=
            [ $name != npz_info ] || argument=examples/data/digits_test.npz
            wine $B/$name.exe $argument </dev/null || return
        done
        say "examples run: 7 passed"
        ;;
    windows-arm64) links zig aarch64-windows-gnu ;;
    macos-arm64) links zig aarch64-macos ;;
    macos-x64) links zig x86_64-macos ;;
    freebsd) links zig x86_64-freebsd ;;
    netbsd) links zig x86_64-netbsd ;;
    openbsd) links zig x86_64-openbsd ;;
    musl-x64) musl x86_64-linux-musl '' $many ;;
    musl-x86) musl x86-linux-musl '' $few ;;
    musl-arm) musl arm-linux-musleabihf qemu-arm $few ;;
    musl-gcc) need musl-gcc && links musl-gcc -static ;;
    armhf) qemu arm arm-linux-gnueabihf $many ;;
    i686) qemu i386 i686-linux-gnu $many chance ;;
    riscv64) qemu riscv64 riscv64-linux-gnu $few ring ;;
    s390x) qemu s390x s390x-linux-gnu $few ring npz inflate ;;
    ppc64le) qemu ppc64le powerpc64le-linux-gnu alloc pool pipeline ;;
    i686-sanitized)
        more="-fsanitize=undefined -fno-sanitize-recover -fsanitize-undefined-trap-on-error"
        qemu i386 i686-linux-gnu $few inflate npz sampler
        ;;
    wasm32)
        need_python wasmtime
        zig wasm32-wasi -std=gnu11 -O1 -I. $warnings -DSPDL_NO_THREADS tests/switches.c \
            -o "$B/$cell.wasm" && "$python" tests/wasm_run.py "$B/$cell.wasm" &&
            say "tests run: 1 passed"
        ;;
    tcc)
        need tcc
        tcc -Wall -Werror -I. -DSPDL_NO_THREADS tests/switches.c -o "$B/tcc.out" -lm &&
            "$B/tcc.out" && say "tests run: 1 passed"
        ;;
    msvc-c11) msvc x86_64 c c11 ;;
    msvc-c17) msvc x86_64 c c17 ;;
    msvc-c++17) msvc x86_64 c++ c++17 ;;
    msvc-c++20) msvc x86_64 c++ c++20 ;;
    msvc-x86) msvc i686 c c17 ;;
    msvc-arm64) msvc aarch64 c c17 ;;
    gcc-c) compiles gcc -x c -- c99 c11 c17 ;;
    gcc-c++) compiles g++ -x c++ -- c++11 c++14 c++17 c++20 c++23 ;;
    gcc-c23) compiles gcc -x c -- c2x ;;
    clang-c) need clang && compiles clang -x c -- c99 c11 c17 c2x ;;
    clang-c++) need clang++ && compiles clang++ -x c++ -- c++11 c++14 c++17 c++20 c++2b ;;
    three-units)
        tests/matrix_units.sh "$B/units" && say "tests run: 1 passed"
        ;;
    shared-libraries)
        tests/matrix_units.sh --shared "$B/shared" && say "tests run: 1 passed"
        ;;
    *) echo "no such cell" ;;
    esac
}

if [ "$1" = --one ]; then
    start=$(date +%s)
    (one "$2") >"$B/$2.log" 2>&1 # which may exit
    echo "$(cat "$B/$2.said") ($(($(date +%s) - start)) s)" >"$B/$2.line"
    exit 0
fi

# --- all ---

case $1 in
--quick) cells=$quick && shift ;;
--long) cells="$cells $quick $long" && shift ;;
*) [ -n "$SPDL_IN_CI" ] || cells="$cells $quick" ;;
esac
[ $# -eq 0 ] || cells=$*
if [ -z "$MATRIX_PYTHON" ] && ! [ -x $B/venv/bin/ready ]; then
    install="python3 -m venv $B/venv && $B/venv/bin/python -m pip -q install ziglang wasmtime"
    if sh -c "$install" >$B/venv.log 2>&1; then
        ln -sf python $B/venv/bin/ready
    else
        echo "failed: $install"
        tail -n 8 $B/venv.log | sed 's/^/    /'
    fi
fi
limit=
if [ ! -t 0 ] && command -v timeout >/dev/null; then limit="timeout -k 10 $limit_s"; fi

# each JOBS: runs the cells that stdin names
each() {
    xargs -P "$1" -I CELL $limit "$0" --one CELL
}

line_of() { cat "$B/$1.line" 2>/dev/null || echo "FAILED: ended after $limit_s s"; }

for cell in $cells; do rm -f "$B/$cell.line" "$B/$cell.failed"; done
printf '%s\n' $cells | each "${JOBS:-$(getconf _NPROCESSORS_ONLN)}"
for cell in $cells; do
    case $(line_of "$cell") in
    FAILED*) rm -f "$B/$cell.line" && echo "$cell" ;;
    esac
done | each 1
passed=0 failed=0 skipped=0
for cell in $cells; do
    line=$(line_of "$cell")
    case $line in
    "not tried"*) [ -z "$SPDL_IN_CI" ] || line="FAILED: $line" ;;
    esac
    printf '%-18s %s\n' "$cell:" "$line"
    case $line in
    FAILED*) failed=$((failed + 1)) && tail -n 8 "$B/$cell.log" | sed 's/^/    /' ;;
    "not tried"*) skipped=$((skipped + 1)) ;;
    *) passed=$((passed + 1)) ;;
    esac
done
echo "$passed passed, $failed failed, $skipped skipped" | tee $B/sum
[ "$failed" -eq 0 ]
