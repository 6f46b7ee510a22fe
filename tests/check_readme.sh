#!/bin/sh
# README.md is true: its ```sh blocks run as written, in a fresh copy of the tree; its ```make rule
# makes its target; its C is that of examples/quickstart.c, with its output; its table of figures
# has at most ten rows; and it is short. The local links of every page lead somewhere.
. "$(dirname "$0")/tally.sh"
root=$PWD

files() {
    { git ls-files --cached --others --exclude-standard 2>/dev/null ||
        find . -type f -not -path './build/*' -not -path './.git/*' | sed 's:^\./::'; } | sort -u |
        while IFS= read -r file; do [ -f "$file" ] && echo "$file"; done
}

files >"$scratch/files"
mkdir -p "$scratch/copy/build"
tar -cf - -T "$scratch/files" | tar -xf - -C "$scratch/copy"
objects=build/$(basename "${CC:-cc}") # what is there need not be built again
[ ! -d "$objects" ] || cp -pR "$objects" "$scratch/copy/build/"

# block.N.LANGUAGE for each fenced block
awk -v prefix="$scratch/block." '
    /^```/ && inside { inside = 0; close(name); next }
    /^```/ { inside = 1; name = sprintf("%s%02d.%s", prefix, ++n, substr($0, 4)); next }
    inside { print >name }' README.md

# Whoever reads has cloned already. SPDL_IN_README keeps `make check` from running itself, and tests
# that ran before from running again.
run_block() {
    cd "$scratch/copy" || return 1
    sed -e 's/^git clone [^&]*&& *//' -e 's/^cd spdl *&& *//' -e 's/^git clone .*/:/' \
        -e 's/^cd spdl *$/:/' "$1" >"$scratch/script"
    unset MAKEFLAGS MFLAGS MAKELEVEL
    SPDL_IN_README=core timeout 300 sh -e "$scratch/script" </dev/null
}

count=0
for block in "$scratch"/block.*.sh; do
    [ -f "$block" ] || continue
    count=$((count + 1))
    if (run_block "$block") >"$scratch/output" 2>&1; then
        ok
        ! grep -q quickstart.c "$block" || cp "$scratch/output" "$scratch/quickstart"
    else
        not_ok "README.md: this block fails:"
        sed 's/^/     $ /' "$block"
        tail -n 20 "$scratch/output" | sed 's/^/     /'
    fi
    cd "$root" || exit 1
done
check "README.md has commands to run" [ "$count" -gt 0 ]

for block in "$scratch"/block.*.make; do
    rm -f "$scratch/copy/spdl.o"
    check "the rule of README.md does not make spdl.o" \
        env -u MAKEFLAGS -u MAKELEVEL make -s -C "$scratch/copy" -f "$block" spdl.o
done

# part_of FILE BLOCK: these lines are in the file, one after the other.
part_of() {
    line=$(grep -nxF "$(head -n 1 "$2")" "$1" | head -n 1 | cut -d: -f1)
    tail -n "+${line:-1}" "$1" | head -n "$(wc -l <"$2")" | diff "$2" -
}

for block in "$scratch"/block.*.c; do
    check "C of README.md is not in examples/quickstart.c" part_of examples/quickstart.c "$block"
done
for block in "$scratch"/block.*.console; do break; done
check "README.md shows another output of the quickstart" diff "$block" "$scratch/quickstart"
words=$(wc -w <README.md)
check "README.md has $words words, more than 1500" [ "$words" -le 1500 ]
rows=$(sed -n '/<!-- figures -->/,/<!-- .figures -->/p' README.md | grep -c '^| [^|]')
check "the figures of README.md have $rows rows, more than ten" [ "$rows" -le 10 ]
check "README.md speaks of goals" sh -c "! grep -niE '\\b(goal|missed)' README.md"

grep '\.md$' "$scratch/files" | while IFS= read -r page; do
    awk '/^```/ { code = !code } !code' "$page" |
        grep -oE '\]\([^)]+\)' | sed -e 's/^](//' -e 's/)$//' -e 's/#.*//' |
        grep -vE '^(https?:|mailto:|$)' | while IFS= read -r link; do
        [ -e "$(dirname "$page")/$link" ] || echo "$page: $link"
    done
done >"$scratch/dead"
empty "links that lead nowhere" "$scratch/dead"
finish
