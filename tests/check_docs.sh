#!/bin/sh
# Every public function has a comment directly above it that says what it does, and then has the
# lines Returns: Threads: Blocks: Owns: in this order. Offenders are named with file and line.
. "$(dirname "$0")/tally.sh"

for header in spdl.h spdl_cuda.h; do
    awk '
        function judge(    i, line, k) {
            if (!closed) return "no comment directly above"
            k = 1
            for (i = 1; i <= lines; ++i) {
                line = text[i]
                sub(/^[ \/*]*/, "", line)
                if (k <= 4 && index(line, word[k]) == 1) {
                    if (k == 1 && i == 1) return "does not say what it does"
                    if (line ~ /^[A-Z][a-z]*:[ *\/]*$/) return "nothing behind " word[k]
                    ++k
                } else if (line ~ /^(Returns|Threads|Blocks|Owns):/) {
                    return "out of order: " line
                }
            }
            return k > 4 ? "" : "no line " word[k]
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
