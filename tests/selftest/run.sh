#!/bin/sh
# Runs the deliberately failing tests and checks that the runner reports each for what it is.
# usage: tests/selftest/run.sh RUNNER
runner=$1
passed=0
failed=0
skipped=0
output=$(mktemp)
trap 'rm -f "$output"' EXIT

ok() {
    passed=$((passed + 1))
}

not_ok() {
    failed=$((failed + 1))
    echo "selftest: $1; the runner said:"
    cat "$output"
}

# ThreadSanitizer waits a second at the end of a process that has threads: as long as the timeout.
export TSAN_OPTIONS="$TSAN_OPTIONS atexit_sleep_ms=0"

# run ARGUMENT ...: what the runner prints is in $output, its exit status in $status
run() {
    TEST_TIMEOUT=1 "$runner" --busy "$@" >"$output" 2>&1
    status=$?
}

# says WHAT PATTERN: a whole line has to match
says() {
    if grep -qx -- "$2" "$output"; then ok; else not_ok "$1: no line '$2'"; fi
}

exits() {
    if [ "$status" -eq "$2" ]; then ok; else not_ok "$1: exit status $status, not $2"; fi
}

# ends WHAT LINE: the last line is exactly this
ends() {
    if [ "$(tail -n 1 "$output")" = "$2" ]; then ok; else not_ok "$1: last line is not '$2'"; fi
}

counts() {
    n=$(grep -c -- "$3" "$output")
    if [ "$n" -eq "$2" ]; then ok; else not_ok "$1: $n lines with '$3', not $2"; fi
}

run
says "a pass" 'ok   self.passes (.*)'
says "a check on a thread" 'FAIL self.check_on_a_thread: 1 failed checks, seed .*'
says "a check on a thread" '.*selftest.c:[0-9]*: CHECK(arg == NULL && 1 > 2) failed'
says "a requirement on a thread" 'FAIL self.require_on_a_thread: 1 failed checks, .*'
says "a check in a forked process" 'FAIL self.check_in_a_fork: 1 failed checks, .*'
says "checks go on" 'FAIL self.check_goes_on: 3 failed checks, .*'
says "both integers" '.*: CHECK_EQ(6 \* 7 == 41), 42 and 41, failed'
says "both strings" '.*: CHECK_STR("one" == "two"), "one" and "two", failed'
says "a string that is NULL" '.*: CHECK_STR(NULL == "two"), "(NULL)" and "two", failed'
says "a requirement leaves" 'FAIL self.require_leaves: 1 failed checks, .*'
says "a million failures" 'FAIL self.check_a_million_times: 1000000 failed checks, .*'
counts "a million failures" 20 'CHECK(i < 0) failed'
says "a sleeping hang" 'FAIL self.hangs: timeout after 1 s, .*'
says "a spinning hang" 'FAIL self.spins: timeout after 1 s, .*'
says "one that ignores the alarm" \
    'FAIL self.ignores_the_alarm: timeout after 1 s, the alarm did not end it, 0 .*'
says "one that ignores the alarm" 'the last words'
says "one that is stopped" 'FAIL self.stops: timeout after 1 s, the alarm did not end it, 0 .*'
says "an abort" 'FAIL self.aborts: signal 6 (Aborted), .*'
says "the address freed last" 'ok   self.hands_out_what_was_freed_last (.*)'
says "a second free" '.*: CHECK(memory is freed once) failed'
says "a second free" 'FAIL self.frees_twice: 1 failed checks, .*'
says "a write to freed memory" '.*: CHECK(byte 7 of freed memory is as it was) failed'
says "a write to freed memory" 'FAIL self.writes_what_it_freed: 1 failed checks, .*'
says "an early exit" 'FAIL self.exits_early: the process ended before the test did, .*'
says "an exit status" 'FAIL self.exits_with_66: exit status 66, .*'
says "a skip" 'skip self.skips: because it is told to'
says "a skip after a failure" 'FAIL self.skips_after_a_failure: 1 failed checks, .*'
says "a table that was not linked" 'FAIL gone: tests/test_gone.c was not linked'
says "the seed" 'seed [0-9]* (--seed sets it)'
exits "failures" 1
ends "all" '4 passed, 18 failed, 1 skipped'

run --no-fork check_goes_on require_leaves skips passes
exits "without fork" 1
ends "without fork" '1 passed, 3 failed, 1 skipped'

run self.passes
exits "a pass" 0
ends "a pass" '1 passed, 0 failed'

run --jobs 3
says "a check beside others" '.*selftest.c:[0-9]*: CHECK(arg == NULL && 1 > 2) failed'
says "a hang beside others" 'FAIL self.hangs: timeout after 1 s, .*'
says "one that is stopped, beside others" \
    'FAIL self.stops: timeout after 1 s, the alarm did not end it, 0 .*'
says "a skip beside others" 'skip self.skips: because it is told to'
counts "a million failures beside others" 20 'CHECK(i < 0) failed'
exits "beside others" 1
ends "beside others" '4 passed, 18 failed, 1 skipped'
if [ "$(grep -n 'self.check_' "$output" | head -n 1 | cut -d: -f1)" -gt \
    "$(grep -n 'self.shows_its_seed' "$output" | cut -d: -f1)" ]; then
    ok
else
    not_ok "those that run alone are the last"
fi

run --brief --jobs 3
says "brief: a module" 'self  *4 passed, 12 failed, 1 skipped'
says "brief: those that run alone" 'self (clocks)  *0 passed, 5 failed'
says "brief: a failure" 'FAIL self.check_goes_on: 3 failed checks, .*'
says "brief: what a failed test prints" '.*: CHECK_EQ(6 \* 7 == 41), 42 and 41, failed'
says "brief: a skip" 'skip self.skips: because it is told to'
counts "brief: no line of a pass" 0 '^ok '
ends "brief" '4 passed, 18 failed, 1 skipped'

run --brief self.passes
says "brief: one job" 'self  *1 passed'
ends "brief: one job" '1 passed, 0 failed'

run --slow self.passes
says "the slow ones" ' *[0-9]* *[0-9]*  self.passes'
ends "the slow ones" '1 passed, 0 failed'

run --repeat 3 self.passes
ends "three rounds" '3 passed, 0 failed'

SELF_TEST_FILE=$output.once
export SELF_TEST_FILE
run fails_once
ends "one that fails once" '0 passed, 1 failed'
rm -f "$SELF_TEST_FILE"
run --second 3 fails_once self.passes
says "a second run" 'self.fails_once: failed once, passed 3 times in a second run'
exits "a second run" 0
ends "a second run" '2 passed, 0 failed'
rm -f "$SELF_TEST_FILE"
unset SELF_TEST_FILE
run --second 3 check_goes_on self.aborts
counts "a second run that fails" 2 'FAIL self.check_goes_on'
says "a second run that fails" 'self.check_goes_on: failed again in a second run'
counts "no second run after a crash" 1 'FAIL self.aborts'
ends "a second run that fails" '0 passed, 2 failed'

# Those that read clocks are skipped while others compute. With one job the check for that starts
# one thread, which may find a processor that is free.
processors=$(getconf _NPROCESSORS_ONLN)
spinners=
for _ in $(seq $((3 * processors))); do
    while :; do :; done &
    spinners="$spinners $!"
done
"$runner" --jobs "$processors" check_goes_on self.passes >"$output" 2>&1
status=$?
# shellcheck disable=SC2086 # a list of processes
kill $spinners
says "a busy machine" 'skip self.check_goes_on: reads clocks, and the machine is busy.*'
exits "a busy machine" 0
ends "a busy machine" '1 passed, 0 failed, 1 skipped'

# One that fails while the machine pauses is not judged; the next one is. A busy machine hides that.
for _ in $(seq 20); do
    "$runner" fails_beside_a_pause check_goes_on >"$output" 2>&1
    status=$?
    grep -q "is busy" "$output" || break
done
if grep -qE "is (busy|slow)" "$output"; then
    echo "skip a machine that pauses: it is busy, or slow under a sanitizer"
    skipped=$((skipped + 1))
else
    says "a machine that pauses" 'skip self.fails_beside_a_pause: .* paused for [0-9]* ms .*'
    says "one after a pause" 'FAIL self.check_goes_on: 3 failed checks, .*'
    exits "a machine that pauses" 1
    ends "a machine that pauses" '0 passed, 1 failed, 1 skipped'
fi
run fails_beside_a_pause
ends "a pause that does not count" '0 passed, 1 failed'

run --list hang spin
exits "a list" 0
ends "a list" 'self.spins'
counts "a list" 2 ''

run no_such_test
exits "nothing selected" 1

run --no-such-option
exits "an unknown option" 2

run --seed 5 shows_its_seed
first=$(grep 'seed of the test' "$output")
TEST_SEED=5 run shows_its_seed
if [ "$first" = "$(grep 'seed of the test' "$output")" ]; then ok; else not_ok "same seed"; fi
run --seed 6 shows_its_seed
if [ "$first" != "$(grep 'seed of the test' "$output")" ]; then ok; else not_ok "other seed"; fi

echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
