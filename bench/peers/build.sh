#!/bin/sh
# Builds one peer of a bench: build.sh SOURCE OUTPUT. The head of the source names the Debian
# packages it needs, and its flags. A peer that cannot be built is left out, and OUTPUT.log says
# what stopped it: that is no failure.
source=$1
output=$2
flags=$(sed -n 's:^// flags\: *::p' "$source")
rm -f "$output" "$output.log"

build() {
    shared="${BENCH_FLAGS:--O2} -fPIC -shared -o $output.new $source"
    case $source in
    *.c) eval "${CC:-cc} -std=gnu11 $shared $flags -lpthread" ;;
    *.cpp) eval "${CXX:-c++} -std=gnu++17 $shared $flags -lpthread" ;;
    *) eval "$flags" ;;
    esac
}

build >"$output.log" 2>&1 && mv "$output.new" "$output" && rm "$output.log"
exit 0
