#!/bin/sh
# spdl_cuda.h without a GPU, and with one: it compiles in every language, with and without CUDA;
# it runs with whatever driver there is, or none; and its tests run on tests/cudart_sim.c, a
# stand-in for the runtime and the driver, under the sanitizers and valgrind. Where there is no
# CUDA toolkit, tests/cudart_min/ stands in for its headers, and what needs more is skipped with a
# line that says so. CUDA_HOME says where it is, CUDA_TESTS picks builds of the last part, and
# `compiles`: all that comes before it.
. "$(dirname "$0")/tally.sh"
: "${WARN:?run this by make test-cuda}"

home=${CUDA_HOME:-/usr/local/cuda}
toolkit=
for folder in "$home/include" /usr/include; do
    if [ -z "$toolkit" ] && [ -f "$folder/cuda_runtime_api.h" ]; then toolkit=$folder; fi
done
library=$home/lib64
[ -d "$library" ] || library=$home/lib
min=-Itests/cudart_min
[ -n "$toolkit" ] || skip "cuda: no CUDA toolkit here (looked in $home and /usr/include)"

wanted() {
    case " ${CUDA_TESTS:-all} " in
    *" all "* | *" $1 "*) true ;;
    *) false ;;
    esac
}

# ---- it compiles -----------------------------------------------------------------------------

# (Warnings that come only with -O2 would be seen where programs are linked, below.)
compile() {
    "$@" -Werror -fsyntax-only -I. -pthread tests/cuda_link.c
}

types() {
    # shellcheck disable=SC2086
    gcc -std=gnu11 $WARN_C -Werror -isystem "$toolkit" -fsyntax-only tests/cuda_types.c
}

# What bench/gpu.sh runs on a device.
for_device() {
    # shellcheck disable=SC2086
    gcc -std=gnu17 $WARN_C -Werror -DCUDA_REAL -O2 -isystem "$home/include" -o "$scratch/$1" \
        $2 "$scratch/kit.o" -L"$library" -lcudart -lstdc++ -lpthread -lm
}

# Its loaders are built by bench/gpu.sh.
step() {
    # shellcheck disable=SC2086
    gcc -std=gnu17 $WARN_C -Werror -isystem "$home/include" -fsyntax-only bench/gpu_step.c
}

# Each language once, each by another family of compilers; check-warnings has the standards.
# shellcheck disable=SC2086
compiles() {
    check "gcc c11" compile gcc -x c -std=c11 $WARN_C
    check "gcc c11 SPDL_CUDA_NONE" compile gcc -x c -std=c11 $WARN_C -DSPDL_CUDA_NONE
    check "clang++ c++17" compile clang++ -x c++ -std=c++17 $WARN
    check "clang++ c++17 SPDL_CUDA_NONE" compile clang++ -x c++ -std=c++17 $WARN -DSPDL_CUDA_NONE
    check "clang++ c++20" compile clang++ -x c++ -std=c++20 $WARN
    if [ -n "$toolkit" ] && [ -f "$toolkit/cuda.h" ]; then
        check "the functions are those of cuda.h" types
    else
        skip "cuda: no cuda.h here"
    fi
    if [ ! -x "$home/bin/nvcc" ]; then
        skip "cuda: no nvcc here (looked in $home/bin)"
        return
    fi
    for define in -DALL -DSPDL_CUDA_NONE; do
        check "nvcc $define" "$home/bin/nvcc" -x cu -Werror all-warnings -I. $define -c \
            -o "$scratch/cu.o" tests/cuda_link.c
    done
    for example in examples/cuda_*.cu; do
        check "nvcc $example" "$home/bin/nvcc" -Werror all-warnings -I. -c -o "$scratch/cu.o" \
            "$example"
        check "$example has at most 160 lines" test "$(wc -l <"$example")" -le 160
    done
    check "nvcc cuda_kit.cu" "$home/bin/nvcc" -Werror all-warnings -Itests -c -o "$scratch/kit.o" \
        tests/cuda_kit.cu
    check "tests for a device" for_device tests \
        "tests/main_cuda.c tests/test_cuda.c tests/test_cuda_back.c"
    check "bench for a device" for_device bench bench/bench_cuda.c
    check "training step for a device" step
}

# ---- it runs with the driver that is there, or none ---------------------------------------------

link() {
    output=$1
    optimised=-O2
    [ -z "$BRIEF" ] || [ "$output" = linked ] || optimised=-O0
    shift
    # shellcheck disable=SC2086 # a list of options
    gcc -std=gnu11 $WARN_C -Werror $optimised -I. -o "$scratch/$output" tests/cuda_link.c "$@" \
        -ldl -lpthread
}

runs() {
    check "link" link linked
    check "link none" link none -DSPDL_CUDA_NONE
    if [ -x "$scratch/linked" ]; then
        check "run" "$scratch/linked"
        grep -E '^(no )?device' "$scratch/output"
        check "run without a driver" env SPDL_LIBCUDA="$scratch/nothing.so" "$scratch/linked"
        if [ -e "$library/stubs/libcuda.so" ]; then
            check "run on the stub" env SPDL_LIBCUDA="$library/stubs/libcuda.so" "$scratch/linked"
        fi
    fi
    if [ -x "$scratch/none" ]; then check "run none" "$scratch/none"; fi
}

if wanted compiles; then
    compiles
    runs
fi

# ---- its tests run on the stand-in ------------------------------------------------------------

wrap=
for name in malloc calloc realloc aligned_alloc posix_memalign mmap pthread_create getpid; do
    wrap="$wrap -Wl,--wrap=$name"
done
asan="-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"

# build NAME COMPILER OPTIONS ...: build/cuda/NAME/tests, and the stand-in beside it
build() {
    folder=build/cuda/$1
    cc=$2
    shift 2
    mkdir -p "$folder"
    case $cc in
    clang) optimised=-O0 ;; # its tests take hardly longer, and it a fifth of the time
    *) optimised=-O1 ;;
    esac
    flags="-std=gnu11 $WARN_C -Werror $optimised -g1 -pthread"
    # shellcheck disable=SC2086
    $cc $flags "$@" -fPIC -shared -o "$folder/libcudart_sim.so" tests/cudart_sim.c &&
        $cc $flags "$@" -o "$folder/tests" tests/main_cuda.c tests/cuda_kit_sim.c \
            tests/test_cuda*.c $wrap -L"$folder" -lcudart_sim -Wl,-rpath,"$PWD/$folder" -ldl -lm
}

# suite NAME COMMAND ...: runs a build, counts its tests
suite() {
    log=build/cuda/$1.log
    what=$1
    shift
    "$@" >"$log" 2>&1
    status=$?
    grep -E '^(FAIL|skip)' "$log" | sed "s/^/$what: /"
    closing=$(grep -E '^[0-9]+ passed, [0-9]+ failed' "$log" | tail -n 1)
    # shellcheck disable=SC2086
    set -- ${closing:-0 passed, 0 failed}
    passed=$((passed + $1))
    failed=$((failed + $3))
    skipped=$((skipped + ${5:-0}))
    if [ "$status" -ne 0 ] && [ "$3" -eq 0 ]; then not_ok "$what: ended with $status"; fi
    if [ "$1" -eq 0 ]; then not_ok "$what: no test has run"; fi
    if [ "$status" -ne 0 ]; then grep -v '^ok ' "$log" | tail -n 40 | sed 's/^/     /'; fi
}

# stand_in NAME COMPILER OPTIONS ...
stand_in() {
    name=$1
    wanted "$name" || return
    failures=$failed
    check "$name: build" build "$@"
    [ "$failed" -eq "$failures" ] || return
    suite "$name" tests/run.sh "build/cuda/$name/tests" $CUDA_ARGS
}

headers=$min
if [ -n "$toolkit" ]; then headers="-isystem $toolkit"; fi
# shellcheck disable=SC2086
{
    stand_in gcc gcc $headers -O2
    [ -z "$toolkit" ] || stand_in gcc-min gcc $min -O2
    stand_in clang clang $headers
    stand_in gcc-per-thread gcc $headers -DCUDA_API_PER_THREAD_DEFAULT_STREAM
    stand_in gcc-asan gcc $headers $asan
    stand_in clang-asan clang $min $asan -O0
    stand_in gcc-tsan gcc $headers -fsanitize=thread
    stand_in clang-tsan clang $min -fsanitize=thread -O0
}
if ! wanted valgrind; then
    :
elif ! command -v valgrind >/dev/null 2>&1; then
    skip "cuda: no valgrind here"
elif [ -x build/cuda/gcc/tests ]; then
    TEST_TIMEOUT=300 suite valgrind valgrind -q --error-exitcode=99 --leak-check=full \
        --show-leak-kinds=definite --errors-for-leak-kinds=definite --fair-sched=yes \
        build/cuda/gcc/tests cuda. cuda_sim. cuda_back.o cuda_back.rows cuda_fault.a_ cuda_fault.an_
fi
finish
