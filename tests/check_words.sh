#!/bin/sh
# Plain English in what users read: the declarations of both headers, every message of the library,
# README.md and examples/README.md. A sentence has at most 25 words. Things do not
# say, ask, tell, stand, lie, meet, come or look. "so" and "beside" are no pronouns. No sentence
# starts with What, Who, Whether, Of or That as a noun. `trainer` is not our word in the headers.
#
# tests/words_allowed.txt names exceptions, at most 20: a rule, a tab, and a part of the sentence.
# `tests/check_words.sh --list [FILE ...]` prints each hit with its place and ends.
. "$(dirname "$0")/tally.sh"
most_allowed=20
allowed=tests/words_allowed.txt

# Sentences of the comments of a header up to the implementation: "file:line<tab>sentence". What is
# indented is code or a table: each line of it counts as a sentence of its own, without a length.
comments() {
    awk '
        function emit(text, where, kind,    rest) {
            rest = text
            while (match(rest, /[A-Za-z0-9)`"_*][.!?]\)? +[^ ]/)) {
                print FILENAME ":" where "\t" kind "\t" substr(rest, 1, RSTART + 1)
                rest = substr(rest, RSTART + RLENGTH - 1)
            }
            if (rest ~ /[A-Za-z]/) print FILENAME ":" where "\t" kind "\t" rest
        }
        function finish() { if (text != "") emit(text, place, kind); text = "" }
        function add(line) {
            if (text == "") place = FNR
            text = text == "" ? line : text " " line
        }
        /^\/\* IMPLEMENTATION/ { exit }
        {
            line = $0
            if (!inside) {
                if (!match(line, /\/\*/)) next
                block = RSTART == 1
                line = substr(line, RSTART + 2)
                inside = 1
                kind = block ? "prose" : "list"
            }
            over = match(line, /\*\//)
            if (over) line = substr(line, 1, RSTART - 1)
            if (block && line ~ /^       /) { # deeper than prose
                if (text ~ /(Returns|Threads|Blocks|Owns):/) {
                    sub(/^ +/, "", line)
                    add(line)
                } else {
                    finish()
                    emit(line, FNR, "table")
                }
            } else {
                sub(/^ +/, "", line)
                if (line == "" || line ~ /^[=>]/) finish()
                else {
                    if (line ~ /^(Returns|Threads|Blocks|Owns):/) { finish(); kind = "list" }
                    add(line)
                }
            }
            if (over) { finish(); inside = 0 }
        }' "$1"
}

# Sentences of the messages: string literals of the implementation, those side by side as one.
messages() {
    awk '
        /^\/\* IMPLEMENTATION/ { started = 1 }
        !started || /^ *\/\*/ || /^#/ { next }
        {
            line = $0
            if (text == "") place = FNR
            while (match(line, /"([^"\\]|\\.)*"/)) {
                before = substr(line, 1, RSTART - 1)
                if (text != "" && before ~ /[^ ]/) { print_text() ; place = FNR }
                text = text substr(line, RSTART + 1, RLENGTH - 2)
                line = substr(line, RSTART + RLENGTH)
            }
            if (line ~ /[^ ]/) print_text()
        }
        function print_text(    n, i, part) {
            if (text ~ /[a-z]+ [a-z]+ /) {
                n = split(text, part, /[.;!?] +/)
                for (i = 1; i <= n; ++i) print FILENAME ":" place "\tmessage\t" part[i]
            }
            text = ""
        }' "$1"
}

# Sentences of a page: paragraphs without code, tables and headings.
page() {
    awk '
        function finish(    rest) {
            rest = text
            while (match(rest, /[A-Za-z0-9)`"_*][.!?:]\)? +[^ ]/)) {
                print FILENAME ":" place "\tprose\t" substr(rest, 1, RSTART + 1)
                rest = substr(rest, RSTART + RLENGTH - 1)
            }
            if (rest ~ /[A-Za-z]/) print FILENAME ":" place "\tprose\t" rest
            text = ""
        }
        /^```/ { finish(); code = !code; next }
        code || /^    / { next }
        /^[|#<]/ || /^ *$/ { finish(); next }
        /^[-*0-9.]+ / { finish() }
        { if (text == "") place = FNR; text = text == "" ? $0 : text " " $0 }
        END { finish() }' "$1"
}

sentences() {
    for file; do
        case $file in
        *.h)
            comments "$file"
            messages "$file"
            ;;
        *) page "$file" ;;
        esac
    done
}

judge() {
    awk -F '\t' '
        function hit(rule) { print rule "\t" $1 "\t" $3 }
        BEGIN {
            verbs = "[ (](says?|said|asks?|asked|tells?|told|stands?|lies?|meets?|comes?|looks?)" \
                    "[ ,.;:)]"
        }
        {
            text = $3
            gsub(/\[([^]]*)\]\([^)]*\)/, "&", text)
            gsub(/\]\([^)]*\)/, "]", text)
            gsub(/`[^`]*`/, "x", text)
            plain = " " tolower(text) " "
            if ($2 != "table") {
                if ($2 == "list") n = split(text, clause, /[;,:] /)
                else { n = 1; clause[1] = text }
                for (i = 1; i <= n; ++i) {
                    words = gsub(/[A-Za-z0-9][^ ]*/, "&", clause[i])
                    if (words > 25) { hit("long"); break }
                }
            }
            if (plain ~ verbs) hit("verb")
            if (plain ~ /hand(s|ed)? (it |them )?on[ ,.;:)]/) hit("verb")
            if (plain ~ / beside[ ,.;:)]/ || plain ~ / so[.,;:)]/ ||
                plain ~ /as ever|all the same/ ||
                plain ~ / (do|does|is|are|be|goes|waits?|takes?|used|came|works?) so /)
                hit("pronoun")
            if (text ~ /^ *(Who|Whether|Of|That) / ||
                (text ~ /^ *What / && text !~ /\? *$/)) hit("start")
            if ($1 ~ /\.h:/ && plain ~ /trainer/) hit("trainer")
        }'
}

list=
if [ "$1" = --list ]; then
    list=1
    shift
fi
[ $# -gt 0 ] || set -- spdl.h spdl_cuda.h README.md examples/README.md
sentences "$@" | judge >"$scratch/hits"

# Exceptions go, and each must still be needed.
: >"$scratch/left"
awk -F '\t' -v used="$scratch/used" '
    FNR == NR { if ($0 !~ /^#/ && NF == 2) { rule[++n] = $1; part[n] = $2 } next }
    {
        for (i = 1; i <= n; ++i)
            if ($1 == rule[i] && index($3, part[i])) { print i >used; next }
        print
    }' "$allowed" "$scratch/hits" >"$scratch/left"

if [ -n "$list" ]; then
    cat "$scratch/left"
    exit
fi
for rule in long verb pronoun start trainer; do
    awk -F '\t' -v rule="$rule" '$1 == rule { print $2 ": " $3 }' "$scratch/left" \
        >"$scratch/of_rule"
    empty "$rule: $(wc -l <"$scratch/of_rule") sentences" "$scratch/of_rule"
done
named=$(grep -cv '^#' "$allowed")
check "at most $most_allowed exceptions in $allowed, not $named" test "$named" -le "$most_allowed"
check "each exception in $allowed is needed" \
    test "$(sort -u "$scratch/used" 2>/dev/null | wc -l)" -eq "$named"
finish
