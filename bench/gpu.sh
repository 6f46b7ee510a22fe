#!/bin/sh
# spdl_cuda.h on a machine with a GPU, each part in less than 4 minutes:
#     bench/gpu.sh test  [NAME]   the tests, on the device; again under compute-sanitizer
#     bench/gpu.sh bench [NAME]   make bench-cuda
#     bench/gpu.sh peers [NAME]   copies against torch's pin_memory().to() and pinned .to()
# The output goes to bench/results/gpu-NAME.txt as well (NAME is test, bench, peers otherwise), with
# the machine, the driver and the date. Needs the CUDA toolkit (CUDA_HOME, /usr/local/cuda), gcc and
# make; peers also python3 with torch.
#
# Without a GPU the same parts run on the stand-in of tests/cudart_sim.c. That shows that this
# script works and nothing else: it says so, and the output goes to build/gpu-NAME.txt.
cd "$(dirname "$0")/.." || exit 1
what=$1
name=${2:-$1}
home=${CUDA_HOME:-/usr/local/cuda}
limit=235 # seconds

case $what in
test | bench | peers) ;;
*)
    sed -n '2,6p' "$0" | sed 's/^# *//'
    exit 2
    ;;
esac

gpu=no
if [ -x "$home/bin/nvcc" ] && nvidia-smi -L >/dev/null 2>&1; then gpu=yes; fi
case $gpu in
yes) results=bench/results ;;
no) results=build ;;
esac
mkdir -p "$results" build

say() {
    printf '%-9s %s\n' "$1" "$2"
}

machine() {
    say date "$(date -u '+%Y-%m-%d %H:%M UTC')"
    say commit "$(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
    say cpu "$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1), $(nproc) cores"
    say memory "$(awk '/^MemTotal/ { printf "%.0f GiB", $2 / 1048576 }' /proc/meminfo)"
    say kernel "$(uname -sr)"
    if [ "$gpu" = yes ]; then
        fields=name,driver_version,memory.total
        fields=$fields,pcie.link.gen.current,pcie.link.width.current
        say gpu "$(nvidia-smi --query-gpu=$fields --format=csv,noheader | head -n 1)"
        say toolkit "$("$home/bin/nvcc" --version | sed -n 's/.*release //p')"
    else
        say gpu "none: SIMULATED, the figures below say nothing about any device"
    fi
    echo
}

# ---- test ----

# The tests of test_cuda.c and test_cuda_back.c as they are, with kernels that run on the device.
build_tests() {
    folder=build/gpu
    mkdir -p "$folder"
    "$home/bin/nvcc" -O2 -arch=native -Itests -c -o "$folder/kit.o" tests/cuda_kit.cu &&
        gcc -std=gnu11 -O1 -g -DCUDA_REAL -isystem "$home/include" -o "$folder/tests" \
            tests/main_cuda.c tests/test_cuda.c tests/test_cuda_back.c "$folder/kit.o" \
            -L"$home/lib64" -lcudart \
            -Wl,-rpath,"$home/lib64" -lstdc++ -ldl -lrt -lpthread -lm
}

sanitize() {
    tool=$1
    shift
    echo "compute-sanitizer --tool $tool"
    "$home/bin/compute-sanitizer" --tool "$tool" --error-exitcode 99 "$@" \
        build/gpu/tests --no-fork cuda.every_size cuda.batches_in_place cuda.order_holds \
        cuda.iterates_inline cuda.arenas_are cuda_back.outputs_come cuda_back.rows_answer 2>&1 |
        tail -n 12
}

run_test() {
    if [ "$gpu" = no ]; then
        CUDA_TESTS=gcc make -s test-cuda
        return
    fi
    build_tests || return 1
    build/gpu/tests --repeat 3
    status=$?
    if [ -x "$home/bin/compute-sanitizer" ]; then
        sanitize memcheck --leak-check full
        sanitize initcheck
        sanitize racecheck
        sanitize synccheck
    else
        echo "no compute-sanitizer in $home/bin: not run"
    fi
    return "$status"
}

# ---- bench and peers ----

run_bench() {
    make -s bench-cuda
}

# One table: ours out of JSON, torch's beside it.
run_peers() {
    make -s bench-cuda JSON=1 ARGS=slots_ >build/gpu-ours.json || return 1
    if ! python3 -c 'import torch' 2>/dev/null; then
        echo "no torch here (pip install torch): its rows are missing"
    fi
    python3 bench/peer_torch_cuda.py build/gpu-ours.json
}

run() {
    machine
    "run_$what"
    echo "ended with $?"
}

if [ -n "$SPDL_GPU_INSIDE" ]; then
    run
    exit
fi
SPDL_GPU_INSIDE=1 timeout "$limit" "$0" "$what" "$name" >"$results/gpu-$name.txt" 2>&1 </dev/null ||
    echo "stopped after $limit s" >>"$results/gpu-$name.txt"
cat "$results/gpu-$name.txt"
echo "written to $results/gpu-$name.txt"
tail -n 1 "$results/gpu-$name.txt" | grep -q '^ended with 0$'
