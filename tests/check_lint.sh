#!/bin/sh
# Tabs, trailing blanks, lines of more than 100 columns (but in Markdown), and files that do not end
# in exactly one newline. One test per text file. And no table of tests is left out.
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
    *.md | *.svg) ;;
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
finish
