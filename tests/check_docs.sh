#!/bin/sh
# Every public function has a comment directly above it that says what it does. Then come, in this
# order, Returns: if it returns a value, and Threads: Blocks: Owns: where they differ from what the
# section says. Offenders are named with file and line.
. "$(dirname "$0")/tally.sh"

for header in spdl.h spdl_cuda.h; do
    awk '
        function judge(returns,    i, line, k, last) {
            if (!closed) return "no comment directly above"
            for (i = 1; i <= lines; ++i) {
                line = text[i]
                sub(/^[ \/*]*/, "", line)
                if (line !~ /^(Returns|Threads|Blocks|Owns):/) continue
                if (i == 1 && line !~ /^Returns:/) return "does not say what it does"
                if (line ~ /^[A-Z][a-z]*:[ *\/]*$/) return "nothing behind " line
                for (k = 1; index(line, word[k]) != 1;) ++k
                if (k <= last) return "out of order: " line
                if (k == 1) returns = 0
                last = k
            }
            return returns ? "no line Returns:" : ""
        }
        BEGIN { split("Returns: Threads: Blocks: Owns:", word, " ") }
        /^#if defined.SPDL_(CUDA_)?IMPLEMENTATION/ { exit }
        /^SPDL_API .*\(/ {
            why = judge($0 !~ /^SPDL_API void [^*]*\(/)
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
