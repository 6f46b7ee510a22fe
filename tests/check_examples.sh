#!/bin/sh
# Builds each example by the commands in its own head comment, as they are written (but CC and CXX
# stand for cc and c++, and EXAMPLE_FLAGS come last), and runs it. An example has at most 120 lines
# (the trainer, and those that use another library, 160 to 255), so that it stays one idea. One
# whose headers are not all there is skipped with its line "Needs:", which says how to install them.
. "$(dirname "$0")/tally.sh"

# The commands run in a folder of their own, which looks like the top of the tree to them.
root=$PWD
cd "$scratch" || exit 1
for name in spdl.h spdl_cuda.h examples; do ln -s "$root/$name" "$name"; done

# The commands of the first comment of a file; quickstart.c has none, README.md has its command.
build_lines() {
    if [ "$1" = examples/quickstart.c ]; then
        echo "cc -O2 -I. examples/quickstart.c -o quickstart -lpthread"
    else
        awk '/^(#|int|static)/ { exit }
            { last = /\*\//; sub(/\*\/.*/, ""); sub(/^(\/\*)? *(Build: *)?/, "") }
            /^(cc|c\+\+|mpicc) / { print }
            last { exit }' "$1"
    fi | sed -e "s:^cc :${CC:-cc} :" -e "s:^c++ :${CXX:-c++} :" -e "s:\$: $EXAMPLE_FLAGS:"
}

# What to install for a file, when something is missing; else nothing.
missing() {
    needs=$(sed -n '1,/\*\//s/^ *Needs: *//p' "$1")
    [ -z "$needs" ] || ${CC:-cc} -E -I. "$1" >/dev/null 2>&1 ||
        { [ "${1#examples/mpi_}" != "$1" ] && mpicc -E -I. "$1" >/dev/null 2>&1; } || echo "$needs"
}

short() {
    [ "$(wc -l <"$1")" -le "$2" ]
}

run() {
    timeout 120 "$@" </dev/null
}

# fails_with STATUS TEXT COMMAND ...: this status, and the text in what it prints
fails_with() {
    expected=$1
    text=$2
    shift 2
    run "$@" >report 2>&1
    [ $? -eq "$expected" ] && grep -qF "$text" report || { cat report; false; }
}

# A program in a folder without its files ends with a sentence.
without_files() {
    program=$PWD/$1
    mkdir -p empty && cd empty && fails_with 1 "examples/data" "$program"
    without=$?
    cd ..
    return $without
}

# says_of_times PATTERN COMMAND ...: one of three runs prints this; a busy machine spoils times
says_of_times() {
    pattern=$1
    shift
    for try in 1 2 3; do
        run "$@" >report 2>&1 || break
        grep -q "$pattern" report && return
    done
    echo "after $try tries:" && cat report && false
}

# ranks N ARGUMENT ...: what the program of $mpi prints under so many ranks
ranks() {
    n=$1
    shift
    run mpirun --allow-run-as-root --oversubscribe -n "$n" "./$mpi" "$@" 2>&1
}

# ranks_fail STATUS TEXT SIGNAL WHICH ARGUMENT ...: the same under 4 ranks, of which the first
# (WHICH is o) or the last one (n) gets a signal; "-" sends none
ranks_fail() {
    ends=$1
    says=$2
    signal=$3
    which=$4
    shift 4
    cp "$mpi" "mpi_$$" # a name that no other run of this script has
    [ "$signal" = - ] || (sleep 2 && pkill "-$signal" "-$which" -x "mpi_$$") &
    fails_with "$ends" "$says" mpirun --allow-run-as-root --oversubscribe -n 4 "./mpi_$$" "$@"
    ended=$?
    wait
    return $ended
}

# The losses are those of one rank, whoever trains and loads, and whatever was interrupted.
run_mpi_train() {
    mpi=mpi_train
    loss=$(ranks 1 | grep '^step 90, loss 0')
    for say in 2 4 "4 loaders 2"; do
        # shellcheck disable=SC2086 # words
        check "mpi_train on $say" test "$loss" = "$(ranks $say | grep '^step')"
    done
    ranks 4 checkpoint run.bin steps 37 >report
    ranks 2 checkpoint run.bin steps 61 >>report
    ranks 2 checkpoint run.bin steps 61 >>report # which has nothing to do, and spoils nothing
    check "mpi_train goes on with other ranks" \
        test "$loss" = "$(ranks 4 loaders 2 checkpoint run.bin | grep '^step')"
    ranks 4 slow 2 >slow
    check "mpi_train names the straggler" grep "rank 2, stage .decode" slow
    check "mpi_train names a rank that is killed" \
        ranks_fail 137 "on signal 9" 9 n steps 1000000
}

# served N ARGUMENT ...: what the trainers got from the servers
served() {
    ranks "$@" | grep -E '^(epoch|order)'
}

# Each epoch has the items of a pipeline without MPI. The order of the batches depends on the number
# of servers only, not on trainers or on what was interrupted.
run_mpi_serve() {
    mpi=mpi_serve
    alone=$(served 1 load 0)
    items=$(echo "$alone" | grep epoch)
    check "mpi_serve alone gives each item once an epoch" \
        test "$(echo "$items" | cut -d, -f1)" = "$(printf 'epoch %d: 1921 items\n' 0 1)"
    check "mpi_serve by 1 server" test "$alone" = "$(served 2 load 0)"
    check "mpi_serve by 1 server for 2 trainers" test "$alone" = "$(served 3 load 0 trainers 2)"
    two=$(served 3 load 0)
    check "mpi_serve by 2 servers: each item once" test "$items" = "$(echo "$two" | grep epoch)"
    check "mpi_serve by 2 servers for 2 trainers" test "$two" = "$(served 4 load 0 trainers 2)"
    three=$(served 4 load 0)
    check "mpi_serve by 3 servers: each item once" test "$items" = "$(echo "$three" | grep epoch)"
    ranks 4 load 0 checkpoint served.bin turns 40 >report
    ranks 5 load 0 checkpoint served.bin turns 83 every 2 trainers 2 >>report
    ranks 5 load 0 checkpoint served.bin turns 83 trainers 2 >>report # nothing to do
    check "mpi_serve goes on with other trainers" \
        test "$three" = "$(served 4 load 0 checkpoint served.bin)"
    check "mpi_serve refuses another number of servers" \
        fails_with 1 "served.bin: not of 2 servers" \
        mpirun --allow-run-as-root --oversubscribe -n 3 ./mpi_serve checkpoint served.bin
    check "mpi_serve names a server that is killed" ranks_fail 137 "process rank 3 " 9 n \
        turns 1000 checkpoint killed.bin every 1
    check "mpi_serve goes on after the kill" test -s killed.bin -a \
        "$(served 4 load 0 turns 1000)" = "$(served 4 load 0 turns 1000 checkpoint killed.bin)"
    check "mpi_serve names a server that fails" \
        ranks_fail 1 "server, rank 2: stage 3 'prepare', item 5" - - fail 2
    check "mpi_serve names a server that hangs" \
        ranks_fail 1 "rank 0: nothing for 3 s from server, rank 3" STOP n turns 3000 timeout 3
    check "mpi_serve names a trainer that hangs" \
        ranks_fail 1 "nothing for 6 s from trainer, rank 0" STOP o turns 3000 timeout 3
}

run_example() {
    case $1 in
    mpi_train) run_mpi_train ;;
    mpi_serve) run_mpi_serve ;;
    npz_info)
        head -c 3000 examples/data/digits_test.npz >cut.npz
        check "npz_info on a good file" run ./npz_info examples/data/digits_test.npz
        check "npz_info on a cut file" fails_with 1 cut.npz ./npz_info cut.npz
        check "npz_info on no file" fails_with 1 none.npz ./npz_info none.npz
        check "npz_info --json" fails_with 0 '"name": "images", "kind": "u"' \
            ./npz_info --json examples/data/digits_test.npz
        ;;
    npz_rows)
        check "npz_rows" fails_with 0 "100 batches, mean of all samples 20" ./npz_rows
        check "npz_rows on a deflated file" fails_with 1 "deflated: it has no rows to pick" \
            ./npz_rows examples/data/digits_test.npz
        ;;
    npz_convert)
        check "npz_convert" fails_with 0 "times as fast" \
            ./npz_convert examples/data/digits_test.npz stored.npz
        check "npz_convert on what it made" fails_with 0 "times as fast" \
            ./npz_convert stored.npz again.npz
        check "npz_convert makes the same again" cmp stored.npz again.npz
        check "npz_convert on no file" fails_with 1 none.npz ./npz_convert none.npz to.npz
        ;;
    image_folder)
        mkdir jpegs
        check "build make_jpegs" \
            "${CC:-cc}" -O2 "$root/tests/make_jpegs.c" -o make_jpegs -ljpeg
        check "make_jpegs" ./make_jpegs jpegs 100
        check "image_folder on 100 files" fails_with 0 "100 images" ./image_folder jpegs
        check "image_folder names a cut file" fails_with 0 "left out: cut.jpg: Premature end" \
            ./image_folder jpegs
        check "image_folder names a text" fails_with 0 "left out: notes.jpg: Not a JPEG" \
            ./image_folder jpegs
        for i in 1 2 3 4 5 6 7 8 9; do cp jpegs/cut.jpg jpegs/cut$i.jpg; done
        check "image_folder over its budget" fails_with 1 "stage 2 'decode', item" \
            ./image_folder jpegs
        ;;
    http_fetch)
        if command -v python3 >/dev/null; then
            check "http_fetch: pages" fails_with 0 "999 pages, 1 not to be had" \
                python3 "$root/tests/http_server.py" ./http_fetch http://127.0.0.1:PORT/ 1000
        else
            skip "run http_fetch: no python3 for its server"
        fi
        check "http_fetch on no server" fails_with 1 "0 pages, 20 not to be had" \
            ./http_fetch http://127.0.0.1:1/ 20
        ;;
    pipeline_class)
        check "pipeline_class" fails_with 0 "3 signals, 3000 samples, then: pitch" ./pipeline_class
        ;;
    two_units) check "two_units: rows in C and C++" fails_with 0 "9900, in C++ 14850" ./two_units ;;
    wav)
        check "wav" run ./wav
        check "wav on no file" fails_with 1 "none*.wav" ./wav none
        ;;
    tokens)
        check "tokens goes on from a checkpoint" fails_with 0 "25 on: the same" ./tokens
        check "tokens on no shard" fails_with 1 "digits_test.npz: a ZIP archive" \
            ./tokens examples/data/digits_test.npz none.bin
        ;;
    echo_server)
        check "echo_server" fails_with 0 "150 answers, 50 requests refused" ./echo_server
        ;;
    requests) check "requests are answered" fails_with 0 "2000 answers; some took" ./requests ;;
    tar)
        if command -v python3 >/dev/null; then
            check "make_tars" python3 "$root/tests/make_tars.py"
            printf '%s.tar\n' ustar pax gnu >tars.txt
            check "tar on 3 formats lists what is there" \
                sh -c './tar @tars.txt | cmp - members.txt'
            head -c 5000 gnu.tar >cut.tar
            check "tar on links" fails_with 1 "at byte 512: 1 links, the first one here" \
                ./tar links.tar
            check "tar on a cut file" fails_with 1 "cut.tar: at byte 5120: cut off" ./tar cut.tar
        else
            skip "run tar: no python3 to make files"
        fi
        check "tar on no tar file" fails_with 1 "no header of a tar file" ./tar "$root/spdl.h"
        check "tar on no file" fails_with 1 "'none.tar': No such file" ./tar none.tar
        ;;
    webdataset)
        check "webdataset" fails_with 0 "1200 samples in 4 shards" ./webdataset
        head -c 100000 shards/train-000000.tar >shards/train-000004.tar
        check "webdataset on a cut shard" fails_with 1 "train-000004.tar: at byte" \
            ./webdataset "shards/train-*.tar"
        ;;
    doctor)
        for cured in 0 1 2; do
            check "doctor $cured for 1 s" fails_with 0 "spdl doctor:" ./doctor $cured 1
        done
        check "doctor of what is not there" fails_with 2 "usage:" ./doctor 3
        ;;
    loader_process)
        check "loader_process" run ./loader_process
        for how in kill resume; do
            check "loader_process $how trains the same model" fails_with 0 \
                "$(./loader_process | cut -d';' -f1)" ./loader_process $how
        done
        check "loader_process poison names the call" fails_with 1 \
            "in stage 1 'decode', item 137" ./loader_process poison
        ;;
    loaders_in_turn)
        for n in 1 2 4; do
            check "loaders_in_turn $n gives the same items" fails_with 0 \
                "$(./loaders_in_turn | cut -d: -f2)" ./loaders_in_turn $n
        done
        ;;
    quickstart_cpp)
        check "quickstart in C++" fails_with 0 4.795 ./quickstart_cpp
        check "quickstart in C++ without its files" without_files ./quickstart_cpp
        ;;
    quickstart)
        check "quickstart without its files" without_files ./quickstart
        check "quickstart" fails_with 0 "mean of the first 4.795" ./quickstart
        check "quickstart with a doctor" fails_with 0 "spdl doctor:" \
            env SPDL_DOCTOR=1 ./quickstart
        ;;
    cuda_*)
        check "run $1 without a device" env SPDL_LIBCUDA=none.so timeout 120 "./$1"
        [ -e libcudart_sim.so ] ||
            check "build the stand-in for CUDA" "${CC:-cc}" -O2 -fPIC -shared \
                -I"$root/tests/cudart_min" "$root/tests/cudart_sim.c" -o libcudart_sim.so -lpthread
        check "run $1 on it" env SPDL_LIBCUDA="$PWD/libcudart_sim.so" timeout 120 "./$1"
        ;;
    autotune) check "autotune" says_of_times "best with [48] reads at a time" ./autotune ;;
    cache) check "cache" says_of_times "were kept: headspace [+][1-9]" ./cache ;;
    *) check "run $1" run "./$1" ;;
    esac
}

for file in examples/*.c examples/*.cpp examples/*/*.c examples/*/*.cpp; do
    [ -f "$file" ] || continue
    limit=120
    case $file in
    examples/train_digits.c | examples/image_folder.c | examples/http_fetch.c) limit=160 ;;
    examples/mpi_train.c) limit=205 ;;
    examples/mpi_serve.c) limit=255 ;;
    examples/resume.c | examples/tokens.c | examples/wav.c) limit=130 ;;
    examples/game_thread.c) limit=140 ;;
    esac
    check "$file has at most $limit lines" short "$file" $limit
    build_lines "$file" >commands
    needs=$(missing "$file")
    if [ -n "$needs" ]; then
        skip "$file: $needs"
    elif [ -s commands ]; then
        name=$(sed -n '$ s/.* -o \([a-z_]*\).*/\1/p' commands)
        check "build $file" sh -e commands
        if [ -x "$name" ]; then run_example "$name"; else not_ok "$file: no program '$name'"; fi
    else
        case $file in
        examples/*/*) ;; # one file of a folder tells for all
        *) not_ok "$file: no build line in its head comment" ;;
        esac
    fi
done
finish
