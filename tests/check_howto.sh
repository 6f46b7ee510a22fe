#!/bin/sh
# examples/HOWTO.md is true: its blocks compile without a warning and do what they say, its C blocks
# as one program with tests/howto.c, its C++ blocks as one with tests/howto.cpp. Blocks marked with
# a library, such as ```c zlib, are part of the program where that library is installed.
. "$(dirname "$0")/tally.sh"
page=examples/HOWTO.md
for language in c cpp; do
    awk -v wanted="$language" '/^```/ { on = substr($0, 4) == wanted; next } on' $page \
        >"$scratch/howto_blocks.$language"
done
mv "$scratch/howto_blocks.c" "$scratch/howto_blocks.h"
mv "$scratch/howto_blocks.cpp" "$scratch/howto_blocks.hpp"
with=
libraries=
for library in zlib:z zstd:zstd; do
    name=${library%:*}
    if printf '#include <%s.h>\n' "$name" | ${CC:-cc} -E -xc - >/dev/null 2>&1; then
        awk -v wanted="c $name" '/^```/ { on = substr($0, 4) == wanted; next } on' $page \
            >"$scratch/howto_$name.h"
        with="$with -DHOWTO_$name"
        libraries="$libraries -l${library#*:}"
    else
        skip "the answers with $name: no $name.h"
    fi
done
export HOWTO_FOLDER="$scratch"
awk '/^## / { name = $0 } /^```/ { if (lines > 28 && name) print name ": " lines " lines"
    on = !on; lines = 0; next } on { lines++ }' $page >"$scratch/long"
empty "answers of more than 28 lines" "$scratch/long"
all="-Wall -Wextra -Wshadow -Wconversion -Werror -O0 -g1 -I. -I$scratch"
c_program() {
    # shellcheck disable=SC2086 # a list of options
    ${CC:-cc} -std=gnu11 $all $1 $with tests/howto.c -o "$scratch/howto" -lpthread $libraries &&
        timeout 60 "$scratch/howto"
}
cpp_program() {
    # shellcheck disable=SC2086 # a list of options
    ${CXX:-c++} -std=c++20 $all $1 tests/howto.cpp -o "$scratch/howto_cpp" -lpthread &&
        timeout 60 "$scratch/howto_cpp"
}
check "the answers in C" c_program ""
check "the answers in C, with AddressSanitizer" c_program -fsanitize=address,undefined
check "the answers in C++" cpp_program ""
check "the answers in C++, with AddressSanitizer" cpp_program -fsanitize=address,undefined
finish
