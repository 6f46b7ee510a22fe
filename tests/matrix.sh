#!/bin/bash
# Systems, processors, compilers: a line for each cell. It says whether tests ran there, a program
# was linked, or the header was compiled; a warning is a failure. A tool that is missing is named.
# Python's tools (zig, wasmtime) go into build/matrix/venv, or come from $MATRIX_PYTHON.
# usage: tests/matrix.sh [--quick] [CELL ...]     --quick: what takes seconds, and no test twice
cd "$(dirname "$0")/.." || exit 1
B=build/matrix
mkdir -p $B
cells="mingw-x64 armhf i686 mingw-examples mingw-x86 mingw-c++ riscv64 ppc64le s390x musl-x64
    musl-x86 musl-arm i686-sanitized windows-arm64 macos-arm64 macos-x64 freebsd netbsd openbsd
    wasm32 tcc musl-gcc msvc-c11 msvc-c17 msvc-c++17 msvc-c++20 msvc-x86 msvc-arm64 gcc-c gcc-c++
    clang-c clang-c++ three-units shared-libraries"
quick="macos-arm64 tcc musl-gcc msvc-c11 msvc-c++20 msvc-x86 msvc-arm64 gcc-c23 three-units
    shared-libraries"
family="pipeline. rows. lifetime. next. flow. batch. branch. again. rewind. state. source. defer.
    fail. push. contract."
ours="core. alloc. ring. pool. $family cache. stats. sampler. inflate. npz files. debug. compare.
    guests."
warnings="-Wall -Wextra -Werror"

# --- what cells share: each ends with its line in `said` ---

say() { echo "$*" >"$B/$cell.said"; }

# need TOOL PACKAGE ...: ends the cell where there is no such program
need() {
    command -v "$1" >/dev/null && return
    shift
    say "not tried: no tool (apt-get install $*)"
    exit 0
}

need_python() {
    python=${MATRIX_PYTHON:-$B/venv/bin/python}
    "$python" -c "import $1" 2>/dev/null && return
    say "not tried: no tool (pip install $1)"
    exit 0
}

# sources: the test files of `ours`
sources() {
    for name in core alloc ring pool pipeline rows lifetime next flow batch branch again rewind \
        state source defer fail push contract cache stats sampler inflate npz files debug compare \
        guests; do
        echo tests/test_$name*.c
    done | tr ' ' '\n' | sort -u; echo tests/library.c
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

# run COMMAND ...: adds up what a runner says
run() {
    local sum
    TEST_TIMEOUT=${TEST_TIMEOUT:-120} "$@" </dev/null >"$B/$cell.tests" 2>&1
    # one that only failed because the machine is busy does not fail twice
    sed -n 's/\r//; s/^FAIL \([a-z0-9_.]*\):.*/\1/p' "$B/$cell.tests" >"$B/$cell.failed"
    sum=$(tr -d '\r' <"$B/$cell.tests" | grep -E '^[0-9]+ passed, [0-9]+ failed' | tail -n 1)
    grep -vE '^ok ' "$B/$cell.tests"
    # shellcheck disable=SC2086 # the words of the closing line
    set -- ${sum:-0 passed, 1 failed}
    if [ "$3" -eq 0 ] && [ "$1" -gt 0 ]; then
        say "tests run: $1 passed${5:+, $5 skipped}"
    else
        say "FAILED: $sum: $(tr '\n' ' ' <"$B/$cell.failed")"
    fi
}

# again RUNNER-COMMAND ...: once more what has failed
again() {
    local before passed
    [ -s "$B/$cell.failed" ] || return
    before=$(tr -d '\r' <"$B/$cell.tests" | grep -cE '^ok ')
    skipped=$(tr -d '\r' <"$B/$cell.tests" | grep -cE '^skip ')
    mapfile -t failed <"$B/$cell.failed"
    run "$@" "${failed[@]}"
    [ ! -s "$B/$cell.failed" ] || return
    passed=$((before + ${#failed[@]}))
    say "tests run: $passed passed, ${#failed[@]} of them in a second run, $skipped skipped"
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
    need clang clang
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

mingw() {
    need "$1-w64-mingw32-gcc" "gcc-mingw-w64-${1/_/-}"
    tests=$(sources)
    build "$cell" "$1-w64-mingw32-gcc" -D__USE_MINGW_ANSI_STDIO=1 \
        -D_FILE_OFFSET_BITS=64 &&
        mv "$B/$cell/runner.exe" "$B/$cell/tests.exe"
}

# qemu CPU PREFIX PACKAGES MODULES ...
qemu() {
    local program=qemu-$1 prefix=$2 packages=$3
    shift 3
    need "$prefix-gcc" "$packages"
    [ "$program" != qemu-i386 ] || program=
    [ -z "$program" ] || need "$program" qemu-user
    build "$cell" "$prefix-gcc" -DTEST_SANITIZED=1 ${program:+-DTEST_EMULATED=1} $more || return
    # shellcheck disable=SC2086 # none where the processor runs it
    run $program "$B/$cell/runner" "$@"
    again $program "$B/$cell/runner"
}

few="tests/test_core.c tests/test_alloc.c tests/test_pool.c tests/test_pipeline.c"

# --- the cells ---

one() {
    cell=$1
    say "FAILED: $B/$cell.log"
    case $cell in
    mingw-x64)
        mingw x86_64 || return
        need wine wine wine64
        export WINEDEBUG=-all WINEPREFIX="$PWD/$B/wine"
        # shellcheck disable=SC2086 # a list
        run wine "$B/$cell/tests.exe" --jobs 2 $ours
        again wine "$B/$cell/tests.exe"
        ;;
    mingw-x86) mingw i686 && say linked ;;
    mingw-c++)
        need x86_64-w64-mingw32-g++ g++-mingw-w64-x86-64
        x86_64-w64-mingw32-g++ -std=c++17 -O1 -I. -static $warnings tests/rows.cpp \
            -o "$B/$cell.exe" || return
        need wine wine wine64
        export WINEDEBUG=-all WINEPREFIX="$PWD/$B/wine"
        wine "$B/$cell.exe" </dev/null && say "tests run: 1 passed"
        ;;
    mingw-examples)
        need x86_64-w64-mingw32-g++ g++-mingw-w64-x86-64
        need wine wine wine64
        export WINEDEBUG=-all WINEPREFIX="$PWD/$B/wine"
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
    musl-x64 | musl-x86 | musl-arm)
        need_python ziglang
        tests=$few
        case $cell in
        musl-x64) target=x86_64-linux-musl program= ;;
        musl-x86) target=x86-linux-musl program= ;;
        musl-arm) target=arm-linux-musleabihf program=qemu-arm ;;
        esac
        [ -z "$program" ] || need "$program" qemu-user
        build "$cell" "$python -m ziglang cc -target $target" -DTEST_SANITIZED=1 || return
        # shellcheck disable=SC2086 # none where the processor runs it
        run $program "$B/$cell/runner" core. alloc. pool. pipeline.
        again $program "$B/$cell/runner"
        ;;
    musl-gcc) need musl-gcc musl-tools && links musl-gcc -static ;;
    armhf) tests=$(sources) && qemu arm arm-linux-gnueabihf "gcc-arm-linux-gnueabihf" $ours ;;
    i686) tests=$(sources) && qemu i386 i686-linux-gnu "gcc-i686-linux-gnu" $ours ;;
    riscv64 | s390x)
        tests="$few tests/test_ring.c tests/test_ring_condvar.c"
        qemu "$cell" "$cell-linux-gnu" "gcc-$cell-linux-gnu" core. ring. alloc. pool. pipeline.
        ;;
    ppc64le)
        tests=$few
        qemu ppc64le powerpc64le-linux-gnu gcc-powerpc64le-linux-gnu alloc. pool. pipeline.
        ;;
    i686-sanitized)
        tests="$few tests/test_inflate.c tests/test_npz.c tests/test_sampler.c"
        more="-fsanitize=undefined -fno-sanitize-recover -fsanitize-undefined-trap-on-error"
        qemu i386 i686-linux-gnu gcc-i686-linux-gnu core. alloc. pipeline. inflate. npz. sampler.
        ;;
    wasm32)
        need_python wasmtime
        zig wasm32-wasi -std=gnu11 -O1 -I. $warnings -DSPDL_NO_THREADS tests/switches.c \
            -o "$B/$cell.wasm" && "$python" tests/wasm_run.py "$B/$cell.wasm" &&
            say "tests run: 1 passed"
        ;;
    tcc)
        need tcc tcc
        tcc -Wall -Werror -I. -DSPDL_NO_THREADS tests/switches.c -o "$B/tcc.out" -lm &&
            "$B/tcc.out" && say "tests run: 1 passed"
        ;;
    msvc-c11) msvc x86_64 c c11 ;;
    msvc-c17) msvc x86_64 c c17 ;;
    msvc-c++17) msvc x86_64 c++ c++17 ;;
    msvc-c++20) msvc x86_64 c++ c++20 ;;
    msvc-x86) msvc i686 c c17 ;;
    msvc-arm64) msvc aarch64 c c17 ;;
    gcc-c) compiles gcc -x c -- c99 c11 c17 c2x ;;
    gcc-c++) compiles g++ -x c++ -- c++11 c++14 c++17 c++20 c++23 ;;
    gcc-c23) compiles gcc -x c -- c2x ;; # the older ones are in check_warnings.sh
    clang-c) need clang clang && compiles clang -x c -- c99 c11 c17 c2x ;;
    clang-c++) need clang++ clang && compiles clang++ -x c++ -- c++11 c++14 c++17 c++20 c++2b ;;
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
    one "$2" >"$B/$2.log" 2>&1
    echo "$(cat "$B/$2.said") ($(($(date +%s) - start)) s)" >"$B/$2.line"
    exit 0
fi

[ "$1" != --quick ] || { cells=$quick && shift; }
[ $# -eq 0 ] || cells=$*
if [ -z "$MATRIX_PYTHON" ] && ! [ -x $B/venv/bin/ready ]; then
    python3 -m venv $B/venv && $B/venv/bin/python -m pip -q install ziglang wasmtime &&
        ln -sf python $B/venv/bin/ready
fi >$B/venv.log 2>&1
# shellcheck disable=SC2086 # a list
printf '%s\n' $cells | xargs -P "${JOBS:-$(getconf _NPROCESSORS_ONLN)}" -I CELL "$0" --one CELL
passed=0 failed=0 skipped=0
for cell in $cells; do
    line=$(cat "$B/$cell.line" 2>/dev/null || echo "FAILED: it did not end")
    printf '%-18s %s\n' "$cell:" "$line"
    case $line in
    FAILED*) failed=$((failed + 1)) && tail -n 8 "$B/$cell.log" | sed 's/^/    /' ;;
    "not tried"*) skipped=$((skipped + 1)) ;;
    *) passed=$((passed + 1)) ;;
    esac
done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
