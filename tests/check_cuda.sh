#!/bin/sh
# spdl_cuda.h with the headers and the runtime of a CUDA toolkit: compiles it without a warning in
# every language, and runs tests/test_cuda.c, which has to work with and without a GPU. Without a
# toolkit there is nothing to check. CUDA_HOME says where it is.
. "$(dirname "$0")/tally.sh"

home=${CUDA_HOME:-/usr/local/cuda}
include=
for folder in "$home/include" /usr/include; do
    if [ -z "$include" ] && [ -f "$folder/cuda_runtime_api.h" ]; then include=$folder; fi
done
if [ -z "$include" ]; then
    skip "cuda: no CUDA toolkit here (looked in $home and /usr/include)"
    finish
fi

library=$home/lib64
[ -d "$library" ] || library=$home/lib

compile() {
    # shellcheck disable=SC2086 # lists of options
    "$@" -Werror -O2 -I. -isystem "$include" -c -o "$scratch/cuda.o" tests/test_cuda.c
}

: "${WARN:?run this by make check-cuda}"
for cc in gcc clang; do
    # shellcheck disable=SC2086
    for std in c11 c17; do check "$cc $std" compile $cc -x c -std=$std $WARN_C; done
done
for cxx in g++ clang++; do
    # shellcheck disable=SC2086
    for std in c++17 c++20; do check "$cxx $std" compile $cxx -x c++ -std=$std $WARN; done
done
if [ -x "$home/bin/nvcc" ]; then
    check "nvcc" "$home/bin/nvcc" -x cu -Werror all-warnings -I. -c -o "$scratch/cu.o" \
        tests/test_cuda.c
fi

link() {
    gcc -O2 -g -I. -isystem "$include" -o "$scratch/test_cuda" tests/test_cuda.c -L"$library" \
        -lcudart_static -ldl -lrt -lpthread
}
check "link" link
if [ -x "$scratch/test_cuda" ]; then
    check "run" "$scratch/test_cuda"
    grep device "$scratch/output"
fi
finish
