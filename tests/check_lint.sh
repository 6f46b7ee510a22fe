#!/bin/sh
# Tabs, trailing blanks, lines of more than 100 columns (but in Markdown and results), and files
# that do not end in exactly one newline. One test per text file. No table of tests is left out. The
# functions that a model names are in spdl.h, in the sections that it names. Variables of the
# environment are read in one place, which looks at the rights of the program.
. "$(dirname "$0")/tally.sh"

files() {
    git ls-files --cached --others --exclude-standard 2>/dev/null ||
        find . -type f -not -path './build/*' -not -path './.git/*' | sed 's:^\./::'
}

tab=$(printf '\t')
LC_ALL=C.UTF-8
export LC_ALL

lint() {
    case $1 in
    Makefile) ;;
    *) grep -n "$tab" "$1" | sed 's/:.*/: tab/' ;;
    esac
    grep -nE '[[:space:]]+$' "$1" | sed 's/:.*/: trailing blank/'
    case $1 in
    *.md | *.svg | bench/results/*.txt) ;;
    *) grep -nE '^.{101,}$' "$1" | sed 's/:.*/: over 100 columns/' ;;
    esac
    [ -z "$(tail -c 1 "$1")" ] || echo "end: no newline at the end"
    [ -n "$(tail -n 1 "$1")" ] || echo "end: blank line at the end"
}

files | grep -v '^tests/corpus/[a-z]*/' | sort -u >"$scratch/files"
while IFS= read -r file; do
    if [ -s "$file" ] && grep -Iq . "$file"; then
        lint "$file" | sed "s:^:$file\::" >"$scratch/offences"
        empty "$file" "$scratch/offences"
    fi
done <"$scratch/files"

sed -n 's/^TEST_TABLE(\([a-z_]*\)).*/\1/p' tests/test_*.c | while IFS= read -r module; do
    grep -q "X($module)" tests/main*.c || echo "$module"
done >"$scratch/unlisted"
empty "tables that tests/main*.c do not list" "$scratch/unlisted"

grep -nE '(getenv|GetEnvironmentVariable[AW]?)\(' spdl.h spdl_cuda.h |
    grep -vE '= (spdl__posix_trusts_user\(\) \? )?getenv\(name\)|= GetEnvironmentVariableW\(wide,' \
        >"$scratch/variables"
empty "variables that are not read by spdl__os_environment" "$scratch/variables"

# FUNCTION >>SECTION for each definition
awk '/^\/\* >>/ { section = $2 }
    /^SPDL_/ && !/;$/ && match($0, /spdl_[a-z0-9_]+\(/) {
        print substr($0, RSTART, RLENGTH - 1), section
    }' spdl.h | sort -u >"$scratch/defined"
for model in tests/model/*.pml; do
    tags=$(grep -oE '>>[a-z-]+' "$model" | sort -u | tr '\n' ' ')
    [ -n "$tags" ] || continue
    for name in $(grep -oE 'spdl_[a-z0-9_]+' "$model" | sort -u); do
        sections=$(sed -n "s/^$name //p" "$scratch/defined" | tr '\n' ' ')
        if [ -z "$sections" ]; then
            grep -qw "$name" spdl.h || echo "$model: there is no $name"
        elif ! echo "$tags" | grep -qwF "$(echo "$sections" | tr ' ' '\n' | grep .)"; then
            echo "$model: $name is in $sections"
        fi
    done
done >"$scratch/misnamed"
empty "functions that a model names, and that its sections do not have" "$scratch/misnamed"
finish
