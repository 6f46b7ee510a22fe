#!/bin/sh
# What `make bench-peers JSON=1` printed becomes the table "What you gain" of README.md, its picture
# (bench/results/gain_light.svg, gain_dark.svg) and the tables of bench/README.md. What is not in
# the file stays as it is. The last lines printed are the sides that were ahead of us.
#   make -s bench-peers JSON=1 >build/figures.jsonl
#   bench/figures.sh build/figures.jsonl
cd "$(dirname "$0")/.." || exit 1
mkdir -p build bench/results
jsonl=${1:?usage: bench/figures.sh FILE.jsonl}

# Shared: reads the lines into value[case, side, field]; best(case, kind) is the fastest side.
read='
function field(name,   at) { # of the line of JSON
    if (!match($0, "\"" name "\":(\"[^\"]*\"|[^,}]*)")) return ""
    at = substr($0, RSTART, RLENGTH)
    sub(/^[^:]*:/, "", at)
    gsub(/"/, "", at)
    return at
}
function kind(side) {
    if (side ~ /^spdl.h/) return "spdl.h"
    if (side ~ /^(PyTorch|SPDL|Grain)/) return substr(side, 1, match(side ",", /,/) - 1)
    return side == "alone" ? side : "C"
}
function best(name, wanted,   i, side, found, sign) { # of shares, in %, the smallest is best
    for (i = 1; i <= sides[name]; ++i) {
        side = order[name, i]
        if (kind(side) != wanted) continue
        sign = unit[name, side] == "%" ? -1 : 1
        if (found == "" || sign * (value[name, side, "value"] - value[name, found, "value"]) > 0)
            found = side
    }
    return found
}
function digits(number) { # 12,345
    number = sprintf(number + 0 < 10 ? "%.2g" : "%.0f", number + 0)
    if (number ~ /\./) return number
    while (number ~ /[0-9][0-9][0-9][0-9]/) sub(/[0-9][0-9][0-9]($|,)/, ",&", number)
    return number
}
function between(name, side) {
    return sprintf("%.2f to %.2f", value[name, side, "ratio_low"], value[name, side, "ratio_high"])
}
FNR == NR {
    name = field("case")
    side = field("side")
    if (name == "machine") machine = field("text")
    if (field("bench") == "frames" && !(name in sides)) {
        side = "spdl.h"
        value[name, side, "value"] = field("ours")
        unit[name, side] = field("unit")
        order[name, sides[name] = 1] = side
    }
    if (field("bench") == "frames") {
        side = field("peer_name")
        value[name, side, "value"] = field("peer")
    } else {
        split("value ratio ratio_low ratio_high cpu_us peak_mb first_ms others", fields)
        for (i in fields) value[name, side, fields[i]] = field(fields[i])
    }
    if (side == "") next
    unit[name, side] = field("unit")
    order[name, ++sides[name]] = side
    if (sides[name] == 1) cases[++count] = name
    next
}'

awk "$read"'
function cell(name, what, wanted,   side, text) {
    side = best(name, wanted)
    if (side == "" || value[name, side, what] == "") return ""
    text = digits(value[name, side, what])
    if (wanted == "spdl.h")
        text = text " " (what == "value" ? unit[name, side] : what == "peak_mb" ? "MB" : "ms")
    if (wanted == "spdl.h" && sub(/^spdl.h, /, "", side)) return text ", " side
    return wanted == "C" ? text ", " side : text
}
/<!-- figures -->/ { on = 1 }
/<!-- \/figures -->/ { on = 0 }
on && /^Measured / && machine != "" {
    $0 = "Measured on " machine "."
}
function line(title, name, what) {
    return "|" title "| " cell(name, what, "spdl.h") " | " cell(name, what, "C") " | " \
           cell(name, what, "PyTorch") " | " cell(name, what, "SPDL") " | " \
           cell(name, what, "Grain") " |"
}
function row(title, name) {
    if (name in sides) print line(" " title " (`" name "`) ", name, "value")
}
on && /^\| \| spdl.h/ { $0 = "| | spdl.h | best in C, C++ | PyTorch | SPDL | Grain |" }
on && /^\|---/ {
    print "|---|--:|--:|--:|--:|--:|"
    row("calls that sleep 10 ms, each at its default", "io_default")
    row("the same, 64 at a time", "io_best")
    next
}
on && match($0, /`io_(default|best)`/) && substr($0, RSTART + 1, RLENGTH - 2) in sides { next }
on && match($0, /`[a-z0-9_.]+`/) {
    name = substr($0, RSTART + 1, RLENGTH - 2)
    what = "value"
    if (name ~ /\./) {
        what = substr(name, index(name, ".") + 1)
        sub(/\..*/, "", name)
    }
    split($0, cells, "|")
    if (name in sides) $0 = line(cells[2], name, what)
}
{ print }' "$jsonl" README.md >build/README.md && cp build/README.md README.md

awk "$read"'
/<!-- peers -->/ {
    print
    print "\n" machine "."
    for (c = 1; c <= count; ++c) {
        name = cases[c]
        if (value[name, order[name, 1], "cpu_us"] == "") continue
        print "\n| `" name "` | " unit[name, order[name, 1]] \
              " | spdl.h is, times | CPU of an item, µs | MB | first batch, ms |"
        print "|---|--:|--:|--:|--:|--:|"
        for (i = 1; i <= sides[name]; ++i) {
            side = order[name, i]
            printf "| %s%s | %s | %s | %s | %s | %s |\n", side,
                (value[name, side, "others"] > 0.06) ? " (beside other programs)" : "",
                digits(value[name, side, "value"]),
                side == best(name, "spdl.h") ? "" : between(name, side),
                digits(value[name, side, "cpu_us"]), digits(value[name, side, "peak_mb"]),
                digits(value[name, side, "first_ms"])
        }
    }
    print ""
    skip = 1
}
/<!-- \/peers -->/ { skip = 0 }
!skip { print }' "$jsonl" bench/README.md >build/README.md && cp build/README.md bench/README.md

# A group of bars for each row; a bar as long as its rate, the longest of its group 330 wide.
draw() { # FILE TEXT_COLOUR OURS OTHERS
    awk -v text="$2" -v ours="$3" -v others="$4" "$read"'
    function say(x, y, size, colour, words) {
        body = body sprintf("<text x=\"%d\" y=\"%d\" font-size=\"%d\" fill=\"%s\">%s</text>\n",
                            x, y, size, colour, words)
    }
    function bar(name, side, colour, most,   width) {
        width = 330 * value[name, side, "value"] / most
        if (width < 1) width = 1
        say(240, y + 10, 11, text, side)
        body = body sprintf("<rect x=\"380\" y=\"%d\" width=\"%.1f\" height=\"12\" rx=\"2\"" \
                            " fill=\"%s\"/>\n", y, width, colour)
        say(386 + width, y + 10, 11, text,
            digits(value[name, side, "value"]) " " unit[name, side])
        y += 16
    }
    function group(name, title,   k, most, shown) {
        if (!(name in sides)) return
        for (k = 1; k <= 4; ++k) {
            shown[k] = best(name, kinds[k])
            if (shown[k] != "" && value[name, shown[k], "value"] + 0 > most)
                most = value[name, shown[k], "value"] + 0
        }
        say(0, y + 10, 12, text, title)
        for (k = 1; k <= 4; ++k)
            if (shown[k] != "") bar(name, shown[k], k == 1 ? ours : others, most)
        y += 10
    }
    END {
        split("spdl.h C PyTorch SPDL", kinds)
        y = 4
        group("io_default", "calls asleep 10 ms, defaults")
        group("jpeg", "JPEGs, steps of 5 ms")
        group("files", "64,000 files of 4 KB")
        group("tokens_late", "reads 5 ms late, steps of 5 ms")
        group("http_256", "HTTP 5 ms late, 256 in flight")
        group("tail", "1 % of items 50 times as long")
        group("npz_deflated", ".npz, deflated, 1.5 MB")
        printf "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"840\" height=\"%d\"" \
               " viewBox=\"0 0 840 %d\" font-family=\"sans-serif\">\n%s</svg>\n", y, y, body
    }' "$jsonl" >"bench/results/$1"
}
draw gain_light.svg "#1f2328" "#0969da" "#afb8c1"
draw gain_dark.svg "#e6edf3" "#388bfd" "#6e7681"

awk "$read"'
END {
    for (c = 1; c <= count; ++c)
        for (i = 2; i <= sides[name = cases[c]]; ++i) {
            side = order[name, i]
            if (kind(side) == "spdl.h" || side == "alone") continue
            if (value[name, side, "ratio_high"] != "" && value[name, side, "ratio_high"] + 0 < 1)
                print "ahead of us: " name ", " side ": " between(name, side)
        }
}' "$jsonl"
