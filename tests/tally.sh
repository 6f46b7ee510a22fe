# Sourced by the check scripts: counts what they check, and prints the closing line.
# shellcheck shell=sh
cd "$(dirname "$0")/.." || exit 1
passed=0
failed=0
skipped=0
scratch=$(mktemp -d) || exit 1
trap 'rm -rf "$scratch"' EXIT
trap 'exit 1' HUP INT TERM

ok() {
    passed=$((passed + 1))
}

not_ok() {
    failed=$((failed + 1))
    echo "FAIL $*"
}

# check WHAT COMMAND ...: the command has to succeed; what it prints is shown when it does not
check() {
    checked=$1
    shift
    if "$@" >"$scratch/output" 2>&1; then
        ok
    else
        not_ok "$checked"
        head -n 20 "$scratch/output" | sed 's/^/     /'
    fi
}

# empty WHAT FILE: the file, a list of offenders, has to be empty
empty() {
    if [ -s "$2" ]; then
        not_ok "$1:"
        sed 's/^/     /' "$2"
    else
        ok
    fi
}

skip() {
    skipped=$((skipped + 1))
    echo "skip $*"
}

finish() {
    if [ "$skipped" -gt 0 ]; then
        echo "$passed passed, $failed failed, $skipped skipped"
    else
        echo "$passed passed, $failed failed"
    fi
    [ "$failed" -eq 0 ]
    exit
}
