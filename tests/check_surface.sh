#!/bin/sh
# The public surface of spdl.h stays small: what its declarations have is counted and compared with
# a bound. `tests/check_surface.sh --list KIND` prints the names of a kind, such as fields. A word
# has a letter or a digit, and is no private name. Lines and words are those of comments and code,
# without the bodies of private macros (SPDL__), which only the public ones use.
. "$(dirname "$0")/tally.sh"

# Prints "KIND name" for each public name: functions (SPDL_API, and the templates of C++), macros
# (not include guards and configuration) and fields of structs (as
# struct.field; a name that ends in _ is private).
awk '
    /^\/\* IMPLEMENTATION/ { exit }
    /^#define SPDL_[A-Z]/ {
        name = $2
        sub(/\(.*/, "", name)
        if (name !~ /_INCLUDED$|^SPDL_API$/) print "macros", name
    }
    { # comments go, also those of several lines
        line = $0
        while (1) {
            if (inside && !sub(/^.*\*\//, "", line)) { line = ""; break }
            inside = 0
            gsub(/\/\*([^*]|\*[^\/])*\*\//, "", line)
            if (!match(line, /\/\*/)) break
            line = substr(line, 1, RSTART - 1)
            inside = 1
            break
        }
    }
    line ~ /^(SPDL_API|template|inline|static) ?.*[ *]spdl_[a-z0-9][a-z0-9_]*\(/ ||
    line ~ /^(SPDL_API|template|inline|static) ?.*> void spdl_[a-z]/ {
        name = line
        sub(/\(.*/, "", name)
        sub(/.*[ *]/, "", name)
        if (name !~ /^spdl__/) print "functions", name
    }
    line ~ /^typedef struct spdl_[a-z0-9_]+ \{/ { struct = $3; text = "" ; next }
    line ~ /^\}/ { struct = "" }
    line ~ /^#ifdef __cplusplus/ { struct = "" } # the setters of a row
    struct != "" && line !~ /^#/ {
        text = text line
        while ((end = index(text, ";")) > 0) {
            field = substr(text, 1, end - 1)
            text = substr(text, end + 1)
            if (match(field, /\(\*[a-z_]+/)) {
                print "fields", struct "." substr(field, RSTART + 2, RLENGTH - 2)
                continue
            }
            count = split(field, part, ",")
            for (i = 1; i <= count; ++i) {
                name = part[i]
                sub(/SPDL__ZERO/, "", name)
                sub(/\[.*/, "", name)
                sub(/ +$/, "", name)
                sub(/.*[ *]/, "", name)
                if (name !~ /_$/) print "fields", struct "." name
            }
        }
    }
' spdl.h | sort -u >"$scratch/names"

if [ "$1" = --list ]; then
    sed -n "s/^$2 //p" "$scratch/names"
    exit
fi

# bound KIND COUNT MOST
bound() {
    if [ "$2" -le "$3" ]; then
        ok "$1: $2, at most $3"
    else
        not_ok "$1: $2, more than $3"
    fi
}

awk '
    /^\/\* IMPLEMENTATION/ { exit }
    /^#define SPDL__/ { private = 1 }
    !private { print }
    !/\\$/ { private = 0 }
' spdl.h >"$scratch/declarations"
bound functions "$(grep -c '^functions' "$scratch/names")" 114
bound macros "$(grep -c '^macros' "$scratch/names")" 38
bound fields "$(grep -c '^fields' "$scratch/names")" 292
bound lines "$(wc -l <"$scratch/declarations")" 2450
bound words "$(tr -s ' \t' '\n\n' <"$scratch/declarations" | grep '[A-Za-z0-9]' |
    grep -civ 'spdl__')" 17000
finish
