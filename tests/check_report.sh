#!/bin/sh
# The page of the reports. That of spdl.h is examples/data/report.html; and in a browser that is not
# there to be looked at: what the document holds when its script has run, in light and dark. The
# pictures stay in build/report/. The browser is Chromium.
. "$(dirname "$0")/tally.sh"
tests/report_page.sh >"$scratch/made"
sed -n '/clang-format off: this array is examples/,/clang-format on/p' spdl.h >"$scratch/page"
check "the page in spdl.h is not examples/data/report.html: make report-page" \
    cmp "$scratch/made" "$scratch/page"
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
    page=$1
    browse --dump-dom "file://$out/$page" >"$scratch/whole"
    # without the script and its data, which have all the words, too
    awk '{ at = index($0, "<script type="); print at ? substr($0, 1, at - 1) : $0 } at { exit }' \
        "$scratch/whole" >"$scratch/dom"
    check "$page is drawn" grep -q '<footer>spdl.h' "$scratch/dom"
}

check "the program is built" ${CC:-cc} -O1 -o "$scratch/report_page" tests/report_page.c -lpthread
check "the pages are written" "$scratch/report_page" "$out"

open_page slow.html
in_page "the verdict stands on top" "stage 2 'decode' was busy"
in_page "the title says what it is" "<title>pictures"
check "one stage is the limit" [ "$(how_many '<div class="stage limit"')" -eq 1 ]
in_page "it is the slow one" '<div class="stage limit" title="decode">'
in_page "its row is marked" '<tr class="limit"><td>decode</td>'
check "a box for each stage and the trainer" [ "$(how_many '<div class="stage')" -eq 6 ]
check "an arrow for each edge" [ "$(how_many '<div class="edge"')" -eq 5 ]
check "eight charts" [ "$(how_many '<div class="card chart">')" -eq 8 ]
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

open_page hostile.html
in_page "names are text" '&lt;img id=bad&gt;&amp;amp;'
not_in_page "and no elements" '<img'
in_page "bytes that are no UTF-8 are replaced" "$(printf 'a\tb\357\277\275\342\202\254')"
check "one heading of the first rank" [ "$(how_many '<h1')" -eq 1 ]

open_page one.html
in_page "it says that it has no plots" "No plots: nothing was sampled"
check "the flow is there" [ "$(how_many '<div class="stage')" -eq 6 ]

open_page feed.html
in_page "requests made way" 'requests made way: '
in_page "a tile for what answers take" '<span>answer p99</span>'
in_page "and in the flow" '<div class="stage" title="answers">'
check "no chart of a trainer" [ "$(how_many '<div class="card chart">')" -eq 7 ]
not_in_page "nor a word" trainer
not_in_page "no number went wrong" NaN
not_in_page "nothing is undefined" undefined

open_page doctor.html
in_page "the doctor's verdict is text" "<h1>'&lt;img id=bad&gt;' limits.</h1>"
not_in_page "and no element" '<img'
check "a bar for each experiment and each end of a trial, and the rounds" \
    [ "$(how_many '<svg width')" -eq 6 ]
check "a dot for each round" [ "$(how_many '<circle')" -eq 2 ]
in_page "a bar ends where it should" '<rect x="0.0%" y="2" width="40.9%" height="10" class="base">'
check "a picture" browse --screenshot="$out/doctor.png" "file://$out/doctor.html"
finish
