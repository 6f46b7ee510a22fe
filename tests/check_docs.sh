#!/bin/sh
# Every public function has a comment directly above it that says what it does. Then come, in this
# order, Returns: if it returns a value, and Threads: Blocks: Owns: where they differ from what the
# section says. Offenders are named with file and line. Every public function and field is used in
# an example or in HOWTO.md.
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

# Every public function of spdl.h, and every field that a program writes, is in the code of an
# example or of HOWTO.md; or it goes. Its name in a comment is no use of it.
{
    cat examples/*.[ch] examples/*.cpp examples/*.cu examples/*/*.[ch] examples/*/*.cpp
    awk '/^```/ { code = !code && /^```c/; next } code' examples/HOWTO.md
} | awk '
    { # comments go, also those of several lines
        line = $0
        sub(/^ *\/\/.*/, "", line)
        while (1) {
            if (inside && !sub(/^.*\*\//, "", line)) { line = ""; break }
            inside = 0
            gsub(/\/\*([^*]|\*+[^*\/])*\*+\//, "", line)
            if (!match(line, /\/\*/)) break
            line = substr(line, 1, RSTART - 1)
            print line
            line = ""
            inside = 1
            break
        }
        if (line != "") print line
    }' >"$scratch/uses"
awk '
    /^#if defined.SPDL_IMPLEMENTATION/ { exit }
    /^SPDL_API .*\(/ && !/spdl__/ {
        sub(/\(.*/, "")
        sub(/.*[ *]/, "")
        print "function\t" $0
    }
    /^typedef struct spdl_.*\{/ { fields = 1 }
    /private: what the macros write/ || /^\}/ { fields = 0 }
    /^    \/\* yours/ { fields = 1 }
    fields && /SPDL__ZERO/ && !/_ SPDL__ZERO|_\[.*SPDL__ZERO|int line / {
        sub(/\/\*.*/, "")
        gsub(/\)\([^;]*\)/, "") # the parameters of a function
        n = split($0, part, /SPDL__ZERO/)
        for (i = 1; i < n; ++i) {
            sub(/ +$/, "", part[i])
            sub(/.*[ *(]/, "", part[i])
            print "field\t" part[i]
        }
    }' spdl.h | sort -u >"$scratch/public"
while read -r kind name; do
    case $kind in
    function) use="(^|[^a-z_])$name([^a-z0-9_]|\$)" ;;
    *) use="(\\.|->|[.]with_|SPDL_SET\\()$name([^a-z0-9_]|\$)" ;;
    esac
    grep -qE "$use" "$scratch/uses" || echo "$kind $name"
done <"$scratch/public" >"$scratch/unused"
check "the list of public names" test "$(wc -l <"$scratch/public")" -gt 150
empty "in no example and not in HOWTO.md" "$scratch/unused"
finish
