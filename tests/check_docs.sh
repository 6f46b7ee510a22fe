#!/bin/sh
# Every public function has a comment directly above it that says what it does, and the line
# Returns: if it returns a value. Offenders are named with file and line.
. "$(dirname "$0")/tally.sh"

for header in spdl.h spdl_cuda.h; do
    awk '
        function judge(    i, line) {
            if (!closed) return "no comment directly above"
            for (i = 1; i <= lines; ++i) {
                line = text[i]
                sub(/^[ \/*]*/, "", line)
                if (i == 1 && line ~ /^(Returns|Threads|Blocks|Owns):/)
                    return "does not say what it does"
                if (line ~ /^(Returns|Threads|Blocks|Owns):[ *\/]*$/) return "nothing behind " line
                if (index(line, "Returns:") == 1) return ""
            }
            return $0 ~ /^SPDL_API void / ? "" : "no line Returns:"
        }
        /^#if.*SPDL_(CUDA_)?IMPLEMENTATION/ { exit }
        /^SPDL_API .*\(/ {
            why = judge()
            name = $0
            sub(/\(.*/, "", name)
            sub(/.*[ *]/, "", name)
            place = FILENAME ":" FNR ": " name
            print (why == "" ? "ok " place : "FAIL " place ": " why)
        }
        /^\/\*/ { lines = 0; inside = 1 }
        inside { text[++lines] = $0 }
        { closed = inside && /\*\/[ ]*$/ }
        /\*\// { inside = 0 }
    ' "$header" >"$scratch/verdicts"
    grep '^FAIL' "$scratch/verdicts"
    failed=$((failed + $(grep -c '^FAIL' "$scratch/verdicts")))
    passed=$((passed + $(grep -c '^ok' "$scratch/verdicts")))
    if [ ! -s "$scratch/verdicts" ]; then not_ok "$header: no public function found"; fi
done
finish
