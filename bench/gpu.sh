#!/bin/sh
# spdl_cuda.h on a machine with a GPU, in parts that are each limited in time:
#     bench/gpu.sh build          what the parts run; needs no GPU, but CUDA_ARCH=sm_90 or so. Carry
#                                 build/gpu, build/bench/bench_pipeline and build/bench/peers along
#     bench/gpu.sh first          test limits bench scale sanitize: 8 minutes
#     bench/gpu.sh second         step peers: 5 minutes
#     bench/gpu.sh PART ...       only these
# The table goes to bench/results/gpu-CARD.txt or, if OUT is set, into that folder, with the
# machine, the driver and the date. It is written again after each part: a run that is cut leaves
# what it has. What the programs printed is in gpu-PART.txt beside it, and in build. Needs the CUDA
# toolkit (CUDA_HOME, /usr/local/cuda), gcc and make; peers also python3 with torch.
#
# Without a GPU the same parts run on the stand-in of tests/cudart_sim.c. That shows that this
# script works and nothing else: it says so, and the table goes to build/gpu-none.txt.
cd "$(dirname "$0")/.." || exit 1
home=${CUDA_HOME:-/usr/local/cuda}
parts=${*:-first second}
case " $parts " in *" first "*) parts="$parts test limits bench scale sanitize" ;; esac
case " $parts " in *" second "*) parts="$parts step peers" ;; esac

arch=${CUDA_ARCH:-all-major}
gpu=no
card=none
results=build
if [ -x "$home/bin/nvcc" ] && nvidia-smi -L >/dev/null 2>&1; then
    gpu=yes
    card=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1 | tr 'A-Z ' 'a-z-')
    results=bench/results
fi
[ -z "$OUT" ] || results=$OUT
mkdir -p "$results" build

say() {
    printf '%-9s %s\n' "$1" "$2"
}

machine() {
    say date "$(date -u '+%Y-%m-%d %H:%M UTC')"
    say commit "${GPU_COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}"
    say cpu "$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1), $(nproc) cores"
    say memory "$(awk '/^MemTotal/ { printf "%.0f GiB", $2 / 1048576 }' /proc/meminfo)"
    say kernel "$(uname -sr)"
    if [ "$gpu" = yes ]; then
        fields=name,driver_version,memory.total
        fields=$fields,pcie.link.gen.max,pcie.link.width.current
        say gpu "$(nvidia-smi --query-gpu=$fields --format=csv,noheader | head -n 1)"
        say toolkit "$("$home/bin/nvcc" --version | sed -n 's/.*release //p')"
    else
        say gpu "none: SIMULATED, the figures below say nothing about any device"
    fi
}

# ---- the parts ----

# The tests of test_cuda.c and test_cuda_back.c as they are, with kernels that run on the device.
build_tests() {
    folder=build/gpu
    mkdir -p "$folder"
    old=$(find spdl.h spdl_cuda.h tests/*cuda* tests/test.h -newer "$folder/tests" 2>&1)
    [ -z "$old" ] && return
    "$home/bin/nvcc" -O2 -arch="$arch" -Itests -c -o "$folder/kit.o" tests/cuda_kit.cu &&
        gcc -std=gnu11 -O1 -g -DCUDA_REAL -isystem "$home/include" -o "$folder/tests" \
            tests/main_cuda.c tests/test_cuda.c tests/test_cuda_back.c "$folder/kit.o" \
            -L"$home/lib64" -lcudart \
            -Wl,-rpath,"$home/lib64" -lstdc++ -ldl -lrt -lpthread -lm
}

# The training step, and what its loaders call with the library that a bare machine may lack. On
# the stand-in if $1 is _sim.
build_step() {
    folder=build/gpu
    mkdir -p "$folder"
    old=$(find spdl.h spdl_cuda.h bench/gpu_step.c bench/bench.h bench/peer_work.* bench/pipe.h \
        bench/peers/pipe_jpeg.c tests/cuda* -newer "$folder/gpu_step$1" 2>&1)
    [ -z "$old" ] && return
    rm -f "$folder"/libjpeg*
    gcc -O2 -shared -fPIC -DPEER_NO_CURL -o "$folder/step_work.so" bench/peer_work.c \
        bench/peers/pipe_jpeg.c -ljpeg -lz -lm -lpthread -Wl,-soname,step_work.so \
        -Wl,-rpath,"\$ORIGIN" || return 1
    ldd "$folder/step_work.so" | awk '/libjpeg/ { print $3 }' | xargs -I@ cp -L @ "$folder"
    set -- "$1" -std=gnu17 -O2 -o "$folder/gpu_step$1" bench/gpu_step.c "$folder/step_work.so" \
        -Wl,-rpath,"\$ORIGIN"
    if [ "$1" = _sim ]; then
        shift
        gcc "$@" -DBENCH_SIMULATED -Itests/cudart_min tests/cuda_kit_sim.c -Lbuild/bench \
            -lcudart_sim -Wl,-rpath,"\$ORIGIN/../bench" -ldl -lpthread -lm
    else
        shift
        "$home/bin/nvcc" -O2 -arch="$arch" -Itests -c -o "$folder/kit.o" tests/cuda_kit.cu &&
            gcc "$@" -isystem "$home/include" "$folder/kit.o" -L"$home/lib64" -lcudart_static \
                -lstdc++ -ldl -lrt -lpthread -lm
    fi
}

# All that needs a compiler. The device's bench does not stay where make looks for the stand-in's.
run_build() {
    if [ -x "$home/bin/nvcc" ]; then
        build_tests && make -s -B build/bench/bench_cuda GPU=yes CUDA_ARCH="$arch" &&
            mv build/bench/bench_cuda build/gpu/bench_cuda && build_step || return 1
    else
        echo "no nvcc here (looked in $home/bin): nothing for a device was built"
    fi
    make -s build/bench/bench_pipeline build/bench/peers/pipe_jpeg.so
}

bench_cuda() {
    if [ "$gpu" = no ]; then
        make -s build/bench/bench_cuda && build/bench/bench_cuda "$@"
    else
        { [ -x build/gpu/bench_cuda ] || run_build; } && build/gpu/bench_cuda "$@"
    fi
}

run_test() {
    if [ "$gpu" = no ]; then
        CUDA_TESTS=gcc make -s test-cuda
        return
    fi
    build_tests && build/gpu/tests
}

# 64 KB of locked memory, as a user who may not raise it.
run_limits() {
    [ "$gpu" = yes ] || return 0
    build_tests || return 1
    plain=
    if [ "$(id -u)" -eq 0 ]; then
        plain='setpriv --reuid=65534 --regid=65534 --clear-groups --inh-caps=-all'
    fi
    # shellcheck disable=SC2039,SC3045,SC2086 # dash, bash and busybox have -l
    (ulimit -l 64 && $plain build/gpu/tests cuda.arenas cuda.only_what cuda.batches_in_place \
        cuda.an_arena_beyond)
}

run_bench() {
    bench_cuda
}

# The benches of pipelines on more and more processors of this machine.
run_scale() {
    make -s build/bench/bench_pipeline build/bench/peers/pipe_jpeg.so || return 1
    SCALE_CPUS=${SCALE_CPUS:-1 2 4 8 $(($(nproc) - 1))} bench/gpu_scale.sh
}

# Batches of JPEGs, decoded in place by more and more workers, and steps of 1, 5 and 20 ms: ours,
# then torch's DataLoader with the same decoder. 15 points of 5 s each, and 12 of 6 s.
run_step() {
    which=
    if [ "$gpu" = no ]; then
        which=_sim
        make -s build/bench/bench_cuda || return 1 # the stand-in
    fi
    build_step $which || return 1
    STEP_CUBLAS=$home/lib64/libcublas.so build/gpu/gpu_step$which build/gpu/step_data || return 1
    STEP_WORKERS=${STEP_WORKERS:-1 4 8 15} python3 bench/gpu_step.py build/gpu/step_work.so \
        build/gpu/step_data
}

# One table: ours out of JSON, torch's beside it.
run_peers() {
    bench_cuda --json slots_ >build/gpu-ours.json || return 1
    if ! python3 -c 'import torch' 2>/dev/null; then
        echo "no torch here (pip install torch): its rows are missing"
    fi
    python3 bench/peer_torch_cuda.py build/gpu-ours.json
}

run_sanitize() {
    if [ "$gpu" = no ] || [ ! -x "$home/bin/compute-sanitizer" ]; then
        echo "compute-sanitizer: not run, there is none"
        return
    fi
    build_tests || return 1
    echo "compute-sanitizer --tool memcheck --leak-check full" # the other tools found nothing
    "$home/bin/compute-sanitizer" --tool memcheck --leak-check full --error-exitcode 99 \
        build/gpu/tests --no-fork cuda.every_size cuda.batches_in_place cuda.order_holds \
        cuda.iterates_inline cuda.arenas_are cuda.two_adopt cuda.blocks_of cuda.threads_share \
        cuda_back.outputs_come cuda_back.rows_answer 2>&1
}

# ---- the table ----

# A part, within so many seconds; what it prints goes to a file of its own.
part() {
    case " $parts " in
    *" $1 "*) ;;
    *) return ;;
    esac
    SPDL_GPU_PART=$1 timeout -k 5 "$2" "$0" >"build/gpu-$1.txt" 2>&1 </dev/null
    status=$?
    case $status in
    0) ;;
    124 | 137) said="$said
part $1: stopped after $2 s" ;;
    *) said="$said
part $1: ended with $status" ;;
    esac
    [ "$status" -eq 0 ] || bad=1
    [ "$results" = build ] || cp "build/gpu-$1.txt" "$results"
    table >"$results/gpu-$card.txt"
}

# rows HEADLINE FILE PATTERN
rows() {
    [ -f "$2" ] || return
    printf '\n%s\n' "$1"
    grep -E "$3" "$2" | sed 's/^=* *//'
}

table() {
    machine
    [ -z "$said" ] || echo "$said"
    bench=build/gpu-bench.txt
    rows '1, 2  tests; two contexts, two of one arena' build/gpu-test.txt '^FAIL|passed,'
    rows '      compute-sanitizer' build/gpu-sanitize.txt '^compute-|SUMMARY|passed,|no-fork|FAIL'
    rows '      columns' $bench '^cuda  '
    rows '3     copies there and back' $bench \
        '^(slots_[0-9]|arena|by_hand|d2h|pageable|packed|in_place_rate)'
    rows '4     overlap' $bench '^(overlap|infer|held)'
    rows '5     what the host spends' $bench \
        '^(paced|wake|calls|trainer|in_place_cpu|slots_cpu|close|contexts)'
    rows '6     pinning' $bench '^pin'
    rows '7     kernel launches beside a loader process' $bench '^launch'
    rows '8     ulimit -l 64; pins of 2.5 GiB' build/gpu-limits.txt '^FAIL|^skip|passed,'
    rows '9     a training step; workers that decode JPEGs' build/gpu-step.txt \
        '^(spdl|torch|a step|no )|SIMUL|bench:|Error'
    rows '10    torch' build/gpu-peers.txt '^(case|slots|no torch)'
    rows '11    more processors' build/gpu-scale.txt '[0-9]: |^stopped'
    echo
    echo "ended with $bad"
}

# first: 460 s of 480. second: 270 s of 300.
all() {
    bad=0
    said=
    case " $parts " in *" second "*) ;; *) rm -f build/gpu-*.txt ;; esac
    part build 120
    part test 65
    part limits 25
    part bench 170
    part scale 140
    part sanitize 60
    part step 195
    part peers 75
}

if [ -n "$SPDL_GPU_PART" ]; then
    "run_$SPDL_GPU_PART"
    exit
fi
all
cat "$results/gpu-$card.txt"
echo "written to $results/gpu-$card.txt"
tail -n 1 "$results/gpu-$card.txt" | grep -q '^ended with 0$'
