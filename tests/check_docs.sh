#!/bin/sh
# Every public function has a comment directly above it that says what it does, and a line Returns:
# where there is something to return. Offenders are named with file and line.
. "$(dirname "$0")/tally.sh"

for header in spdl.h spdl_cuda.h; do
    awk '
        function judge(declaration,    i, line, k) {
            if (!closed) return "no comment directly above"
            for (i = 1; i <= lines; ++i) {
                line = text[i]
                sub(/^[ \/*]*/, "", line)
                if (line ~ /^(Returns|Threads|Blocks|Owns):[ *\/]*$/) return "nothing behind " line
                if (i == 1 && line ~ /^(Returns|Threads|Blocks|Owns):/)
                    return "does not say what it does"
                if (line ~ /^Returns:/) ++k
            }
            return k > 0 || declaration ~ /^SPDL_API void [^*]/ ? "" : "no line Returns:"
        }
        /^#if.*SPDL_(CUDA_)?IMPLEMENTATION/ { exit }
        /^SPDL_API .*\(/ {
            why = judge($0)
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
