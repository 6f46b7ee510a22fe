#!/bin/sh
# Every public function has a comment directly above it that says what it does, and has a line
# Returns: if it returns anything. The lines Returns: Threads: Blocks: Owns: stand in this order.
# Offenders are named with file and line.
. "$(dirname "$0")/tally.sh"

for header in spdl.h spdl_cuda.h; do
    awk '
        function judge(    i, line, k, n, returns) {
            if (!closed) return "no comment directly above"
            for (i = 1; i <= lines; ++i) {
                line = text[i]
                sub(/^[ \/*]*/, "", line)
                if (line !~ /^(Returns|Threads|Blocks|Owns):/) continue
                for (n = 1; index(line, word[n]) != 1; ++n) {}
                if (i == 1) return "does not say what it does"
                if (n <= k) return "out of order: " line
                if (line ~ /^[A-Z][a-z]*:[ *\/]*$/) return "nothing behind " word[n]
                returns = returns || n == 1
                k = n
            }
            return returns || $0 ~ /^SPDL_API void [a-z]/ ? "" : "no line Returns:"
        }
        BEGIN { split("Returns: Threads: Blocks: Owns:", word, " ") }
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
