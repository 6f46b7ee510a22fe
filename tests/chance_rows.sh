#!/bin/sh
# Leaves rows out of a random pipeline that fails, as long as it still does, and shows what is left.
# usage: tests/chance_rows.sh RUNNER NUMBER [ROUNDS]   ROUNDS: how often each is tried (100)
runner=${1:?usage: tests/chance_rows.sh RUNNER NUMBER [ROUNDS]}
export CHANCE="${2:?}" CHANCE_ROUNDS="${3:-100}" TEST_TIMEOUT="${TEST_TIMEOUT:-60}"
run=$(dirname "$0")/run.sh
log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT

# fails ROWS: it fails without these rows
fails() {
    ! CHANCE_WITHOUT=$1 "$run" "$runner" chance. >"$log" 2>&1
}

fails "" || { echo "it does not fail in $CHANCE_ROUNDS rounds" && exit 1; }
without=
for row in $(seq 30); do
    ! fails "$without$row" || without=$without$row,
done
fails "$without"
cat "$log"
echo "CHANCE=$CHANCE CHANCE_WITHOUT=$without CHANCE_ROUNDS=$CHANCE_ROUNDS $run $runner chance."
