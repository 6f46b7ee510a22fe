#!/bin/sh
# examples/MESSAGES.md has every message of spdl.h. A message is a string of the implementation with
# two words or more, or an argument of a function that reports errors. The page needs the longest
# part of it without a conversion. If that has fewer than 12 characters, the page needs all of it,
# with N for numbers and ..., x or 'x' for texts.
# Not checked: the sentences of the verdict, the doctor and headspace (examples/README.md), JSON,
# names in a trace, the text of a saved state, test points, assembly, and the list `unlisted`.
# `tests/check_messages.sh --list` prints line, section and string of each message.
. "$(dirname "$0")/tally.sh"
page=examples/MESSAGES.md
fewest=400 # strings; fewer means that they are not found any more

# line, section, string; literals side by side are one
strings() {
    awk '
        BEGIN {
            split("text stats doctor doctor-text headspace trace-core", name, " ")
            for (i in name) skipped[">>" (name[i] ~ /core/ ? name[i] : name[i] "-impl")] = 1
            unlisted = "^(version https://git-lfs|const void|quota period|max period" \
                       "|total_inactive_file |inactive_file |[(]unknown file[)]" \
                       "|[.][.][.] \047decode\047.*|next waits|edge %d depth.*" \
                       "|The limit changed.*|  %s %s, %llu items|ended after|  %.2f of .*)$"
        }
        /^\/\* IMPLEMENTATION/ { started = 1 }
        /^ *\/\* >>/ { section = $2 }
        comment { comment = !/\*\//; next }
        /^ *\/\*/ { comment = !/\*\//; next }
        !started || section in skipped || /^#/ { next }
        /TEST_POINT|SPDL__PRAGMA|_Pragma|__asm__|arch_extension/ { next }
        {
            line = $0
            gsub(/\047\\?"\047/, "", line)
            if (text == "") place = FNR
            while (match(line, /"([^"\\]|\\.)*"/)) {
                before = substr(line, 1, RSTART - 1)
                if (text != "" && before ~ /[^ ]/) { show(); place = FNR }
                if (text == "") fails = before ~ /(fail|refuse|error)[(].*, $/
                text = text substr(line, RSTART + 1, RLENGTH - 2)
                line = substr(line, RSTART + RLENGTH)
            }
            if (line ~ /[^ ]/) show()
        }
        function show() {
            gsub(/\\n/, "", text)
            gsub(/\\"/, "\"", text)
            gsub(/\\\\/, "\\", text)
            if ((text ~ /[A-Za-z]+[^ ]* [^ ]*[a-z]/ || fails) && text !~ unlisted &&
                text !~ /^ [a-z_]+=|^spdl[.]state|":|: [(]%|\{\047/ && text ~ /[a-z][a-z][a-z]/)
                print place "\t" section "\t" text
            text = ""
        }' spdl.h
}

# Strings that are not in the page.
missing() {
    awk -F '\t' '
        function form(text) {
            gsub(/%[-+ #0-9.*]*(ll|l|z|h)?[diouxXeEfgGc]/, "N", text)
            gsub(/%[-+ #0-9.*]*s/, "...", text)
            gsub(/[.][.][.]([.][.][.])+/, "...", text)
            sub(/^[. ]*/, "", text)
            sub(/[.]*$/, "", text)
            return text
        }
        function plain(text) {
            gsub(/\\\|/, "|", text)
            gsub(/\047x\047/, "\047...\047", text)
            gsub(/ x /, " ... ", text)
            gsub(/%%/, "%", text)
            return text
        }
        FILENAME != "-" { all = all "\n" plain($0); next }
        {
            text = $3
            gsub(/%%/, "\001", text)
            n = split(text, part, /%[-+ #0-9.*]*(ll|l|z|h)?[diouxXeEfgGcs]/)
            longest = ""
            for (i = 1; i <= n; ++i)
                if (length(part[i]) > length(longest)) longest = part[i]
            if (length(longest) < 12) longest = form(text)
            gsub(/\001/, "%", longest)
            sub(/^ +/, "", longest)
            sub(/ +$/, "", longest)
            if (!index(all, longest)) print "spdl.h:" $1 ": " $2 " " $3
        }' "$page" -
}

strings >"$scratch/strings"
if [ "$1" = --list ]; then
    cat "$scratch/strings"
    exit
fi
# The results have the numbers and texts of the header.
results="s/^ *X(\\(SPDL_[A-Z_]*\\), \\(-*[0-9]*\\), \"\\(.*\\)\").*/| \`\\1\` (\\2) | \\3 |/p"
sed -n "$results" spdl.h >"$scratch/results"
check "results found in spdl.h" test "$(wc -l <"$scratch/results")" -ge 20
while read -r row; do
    grep -qF "$row" "$page" || echo "$row"
done <"$scratch/results" >"$scratch/stale"
empty "results that $page has with another number or text" "$scratch/stale"

count=$(wc -l <"$scratch/strings")
check "only $count messages found, not $fewest" test "$count" -ge "$fewest"
missing <"$scratch/strings" >"$scratch/missing"
empty "messages that are not in $page" "$scratch/missing"
passed=$((passed + count - $(wc -l <"$scratch/missing")))
sed -n 's/^ *X(\(SPDL_[A-Z_]*\), \(-*[0-9]*\), "\(.*\)").*/| `\1` (\2) | \3 |/p' spdl.h |
    while IFS= read -r row; do grep -qF "$row" "$page" || echo "$row"; done >"$scratch/results"
empty "results that $page has with another number or text" "$scratch/results"
finish
