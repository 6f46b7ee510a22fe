#!/bin/sh
# The page of the reports as C strings, for >>report-impl of spdl.h: prints the section that
# `make report-page` puts there (report_page.sh --write) and check_report.sh compares.
cd "$(dirname "$0")/.." || exit 1
begin='/* clang-format off: this array is examples/data/report.html, made by `make report-page` */'

strings() {
    echo "$begin"
    LC_ALL=C awk '
    # Comments go, and in the script every blank that does not part two words.
    /^<!--/ && !/<!-- data -->/ { comment = 1 }
    comment { if (/-->/) comment = 0; next }
    /^ *\/\// || /^ *$/ { next }
    /<!-- data -->/ { flush(); print "NULL,"; next }
    { sub(/^ +/, ""); add($0) }
    /<script>$/ { script = 1 }
    function word(c) { return c ~ /[A-Za-z0-9_$]/ }
    function add(line,    i, c, rest) {
        if (word(last) && word(substr(line, 1, 1))) put(" ")
        for (i = 1; i <= length(line); i++) {
            c = substr(line, i, 1)
            if (quote) { if (c == quote) quote = "" }
            else if (c == "\047" || c == "`") quote = c
            else if (script && c == " ") {
                rest = substr(line, i + 1, 1)
                if (!word(last) || !word(rest)) continue
            }
            put(c)
        }
    }
    # A string of C has 4095 characters at most.
    function put(c) {
        last = c
        if (c == "\\" || c == "\"") c = "\\" c
        if (length(text) + length(c) > 97) { print "\"" text "\""; text = "" }
        if (size >= 4000) flush()
        text = text c
        size += length(c)
    }
    function flush() { print "\"" text "\","; text = ""; size = 0; last = "" }
    BEGIN { print "static const char *const spdl__page[] = {" }
    END { put("\\n"); flush(); print "NULL,\n};" }
    ' examples/data/report.html
    echo '/* clang-format on */'
}

if [ "$1" != --write ]; then
    strings
    exit
fi
made=$(mktemp) || exit 1
strings >"$made"
awk -v made="$made" -v begin="$begin" '
    $0 == begin { while ((getline line < made) > 0) print line }
    $0 == begin, /clang-format on/ { next }
    { print }' spdl.h >"$made.h" && cat "$made.h" >spdl.h
rm -f "$made" "$made.h"
