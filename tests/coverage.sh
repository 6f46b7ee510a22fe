#!/bin/sh
# Which branches of the headers the tests take: the share of each section and of all, and those
# that no test takes and that have no reason in tests/uncovered.md. Counters lie in files, so those
# of children count that end by _exit or a signal. CUDA tests run on the stand-in for the runtime.
# usage: tests/coverage.sh [--all] [SECTION ...]   --all: shows those with a reason, too
cd "$(dirname "$0")/.." || exit 1
for tool in clang llvm-cov llvm-profdata python3; do
    command -v $tool >/dev/null 2>&1 && continue
    echo "skip coverage: no $tool (apt-get install clang llvm python3)"
    echo "0 passed, 0 failed, 1 skipped"
    exit 0
done

build=build/coverage
mkdir -p $build
rm -f $build/*.profraw
flags="-O0 -g1 -w -fprofile-instr-generate -fprofile-update=atomic -fcoverage-mapping"
flags="$flags -mllvm -runtime-counter-relocation -Wno-unused-command-line-argument"
export LLVM_PROFILE_FILE="$PWD/$build/%m%c.profraw"
MAKEFLAGS='' "${MAKE:-make}" -s -j"$(getconf _NPROCESSORS_ONLN)" B=$build CC=clang CFLAGS="$flags" \
    $build/runner || exit 1
TEST_TIMEOUT=${TEST_TIMEOUT:-120} tests/run.sh $build/runner --busy \
    --jobs "$(getconf _NPROCESSORS_ONLN)" >$build/log 2>&1 || grep -E '^FAIL' $build/log
tail -n 1 $build/log

wrap=
for name in malloc calloc realloc aligned_alloc posix_memalign mmap pthread_create; do
    wrap="$wrap -Wl,--wrap=$name"
done
# shellcheck disable=SC2086 # lists of options
clang -std=gnu11 -w -O0 -pthread -Itests/cudart_min -fPIC -shared tests/cudart_sim.c \
    -o $build/libcudart_sim.so &&
    clang -std=gnu11 -w $flags -pthread -Itests/cudart_min tests/main_cuda.c tests/cuda_kit_sim.c \
        tests/test_cuda*.c $wrap -L$build -lcudart_sim -Wl,-rpath,"$PWD/$build" -ldl -lm \
        -o $build/cuda || exit 1
tests/run.sh $build/cuda >$build/cuda.log 2>&1 || grep -E '^FAIL' $build/cuda.log
tail -n 1 $build/cuda.log

# What is there for C++ alone, and the corpus of the fuzz targets with some inputs made of it.
objects=
for name in cpp rows; do
    # shellcheck disable=SC2086 # lists of options
    clang++ -std=c++20 $flags -I. -pthread tests/$name.cpp -o $build/$name &&
        $build/$name >/dev/null 2>&1 || echo "FAIL $name.cpp"
    objects="$objects -object $build/$name"
done
for target in npy directory inflate npz roundtrip files text; do
    # shellcheck disable=SC2086 # lists of options
    clang -std=gnu11 $flags -pthread -DFUZZ_DRIVER -DFUZZ_NO_ZLIB tests/fuzz_$target.c \
        -o $build/fuzz_$target &&
        $build/fuzz_$target -runs=2000 tests/corpus/$target >/dev/null 2>&1 ||
        echo "FAIL fuzz_$target"
    objects="$objects -object $build/fuzz_$target"
done

# Examples and random pipelines with faults of the system.
python3 tests/torture_faults.py --points "${FAULTS:-600}" --build $build/faults --flags "$flags" \
    >$build/faults.log 2>&1 || grep -E '^FAIL' $build/faults.log
tail -n 1 $build/faults.log
objects="$objects -object $build/faults/chance -object $build/faults/quickstart"

# shellcheck disable=SC2086 # a list of options
llvm-profdata merge -sparse $build/*.profraw -o $build/all.profdata &&
    llvm-cov export -format=text -instr-profile=$build/all.profdata $build/runner $objects \
        -object $build/cuda >$build/branches.json || exit 1
exec python3 tests/coverage.py $build/branches.json "$@"
