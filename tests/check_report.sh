#!/bin/sh
# examples/data/report.html in a browser that is not there to be looked at: what the document holds
# when its script has drawn the lines of a run, in light and dark. The pictures stay in
# build/report/. The browser is Chromium.
. "$(dirname "$0")/tally.sh"
browser=$(command -v chromium || command -v chromium-browser || command -v google-chrome)
if [ -z "$browser" ]; then
    skip "no Chromium (Debian: apt-get install chromium)"
    finish
fi
out=$PWD/build/report
mkdir -p "$out"

# browse OPTION ... FILE: one run; a loaded machine may need a second one
browse() {
    for attempt in 1 2; do
        timeout 90 "$browser" --headless --no-sandbox --disable-gpu --hide-scrollbars \
            --user-data-dir="$scratch/profile$attempt" --window-size=1200,1850 "$@" \
            2>"$scratch/browser.log" && return
    done
    cat "$scratch/browser.log"
    return 1
}

# in_page WHAT TEXT: the document has it; not_in_page: it has not
in_page() {
    check "$page: $1" grep -qF -- "$2" "$scratch/dom"
}
not_in_page() {
    check "$page: $1" sh -c '! grep -qF -- "$1" "$2"' sh "$2" "$scratch/dom"
}

# how_many TEXT: in the elements, not in the script
how_many() {
    sed 's/<script.*//' "$scratch/dom" | grep -oF -- "$1" | wc -l
}

open_page() {
    page=$1.html
    sed "/id='data'>/,\$d" examples/data/report.html >"$out/$page"
    echo "</main><script type='application/json' id='data'>" >>"$out/$page"
    cat "$out/$1.jsonl" >>"$out/$page"
    { echo '</script><script>'; sed "1,/id='data'>/d" examples/data/report.html; } >>"$out/$page"
    browse --dump-dom "file://$out/$page" >"$scratch/whole"
    # without the script and its data, which have all the words, too
    awk '{ at = index($0, "<script type="); print at ? substr($0, 1, at - 1) : $0 } at { exit }' \
        "$scratch/whole" >"$scratch/dom"
    check "$page is drawn" grep -q '<footer>spdl.h' "$scratch/dom"
}

check "the program is built" ${CC:-cc} -O1 -o "$scratch/report_page" tests/report_page.c -lpthread
check "the lines are written" "$scratch/report_page" "$out"

open_page slow
in_page "the verdict stands on top" "The consumer waited"
in_page "the doctor is drawn" '<h2>Doctor</h2>'
in_page "the title says what it is" "<title>pictures"
check "one stage is the limit" [ "$(how_many '<div class="stage limit"')" -eq 1 ]
in_page "it is the slow one" '<div class="stage limit" title="decode">'
in_page "its row is marked" '<tr class="limit"><td>decode</td>'
check "a box for each stage and the consumer" [ "$(how_many '<div class="stage')" -eq 6 ]
check "an arrow for each edge" [ "$(how_many '<div class="edge"')" -eq 5 ]
check "a row for the consumer" [ "$(how_many '<td>consumer</td>')" -eq 1 ]
in_page "what limited when" '<h2>What limited when</h2>'
check "a stripe for each interval" [ "$(how_many '%;background:')" -ge 4 ]
check "the time of the doctor is marked" [ "$(how_many 'class="doctor"')" -eq 8 ]
in_page "its intervals are drawn" '<i class="off"'
not_in_page "one run has none beside it" 'Runs side by side'
check "eight charts" [ "$(how_many '<div class="card chart">')" -eq 8 ]
in_page "the limit in words" 'too few calls of decode'
check "the first interval is drawn" grep -qE 'd="M54 [0-9.]+L' "$scratch/dom"
check "the headline is short" sh -c \
    'grep -oE "<h1[^<]*" "$1" | wc -w | { read n; [ "$n" -le 31 ]; }' sh "$scratch/dom"
check "no advice of a doctor that was there" sh -c \
    '! grep -oE "id=.?more[^<]*" "$1" | grep -q SPDL_DOCTOR' sh "$scratch/dom"
check "lines in them" [ "$(how_many 'fill="none"')" -ge 22 ]
not_in_page "no number went wrong" NaN
not_in_page "nothing is undefined" undefined
not_in_page "nothing is infinite" Infinity
for scheme in 1:light 0:dark; do
    check "a picture of ${scheme#*:}" browse --blink-settings=preferredColorScheme="${scheme%:*}" \
        --screenshot="$out/${scheme#*:}.png" "file://$out/slow.html"
    check "which is one" test -s "$out/${scheme#*:}.png"
done
check "light and dark differ" sh -c '! cmp -s "$1/light.png" "$1/dark.png"' sh "$out"

open_page hostile
in_page "names are text" '&lt;img id=bad&gt;&amp;amp;'
not_in_page "and no elements" '<img'
in_page "bytes that are no UTF-8 are replaced" "$(printf 'a\tb\357\277\275\342\202\254')"
check "one heading of the first rank" [ "$(how_many '<h1')" -eq 1 ]

open_page cut
in_page "a cut line is told" '1 line was cut or no JSON, and left out.'
in_page "the others are drawn" '<h2>What limited when</h2>'

open_page branch
check "a path below the other" [ "$(how_many '<div class="fork">')" -eq 1 ]
check "both are there" [ "$(how_many '<div class="edge">')" -ge 2 ]
in_page "its paths have names" '<div class="edge">large</div>'
not_in_page "nothing is undefined" undefined

open_page deferred
check "no share is over 100 %" sh -c \
    '! grep -oE "[0-9]+ % busy" "$1" | grep -qvE "^([0-9]{1,2}|100) "' sh "$scratch/dom"

open_page hours
in_page "hours are hours" ' h</text>'
in_page "in words, too" '24.0 h'

open_page two
in_page "runs stand beside each other" 'Runs side by side'
check "a line for each" [ "$(how_many ', process ')" -ge 4 ]

open_page one
in_page "it says that it has no plots" "No plots: they need four lines"
check "the flow is there" [ "$(how_many '<div class="stage')" -eq 6 ]

open_page feed
in_page "requests were dropped" 'requests were dropped: '
in_page "a tile for what answers take" '<span>answer p99</span>'
in_page "and in the flow" '<div class="stage" title="answers">'
not_in_page "no chart of a consumer" '<h3>Consumer waiting</h3>'
check "the other charts" [ "$(how_many '<div class="card chart">')" -ge 6 ]
not_in_page "no number went wrong" NaN
not_in_page "nothing is undefined" undefined

finish
