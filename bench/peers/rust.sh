#!/bin/sh
# Builds a Rust program with the crates of Debian's librust packages: rust.sh SOURCE OUTPUT.
set -e
crates=/usr/share/cargo/registry
folder=$(dirname "$2")/rust-crates

crate() { # NAME EDITION FLAGS...
    name=$1
    edition=$2
    shift 2
    for source in "$crates/$name"-[0-9]*/src/lib.rs; do
        rustc --cap-lints allow --edition "$edition" -O -C panic=abort --crate-type rlib \
            --crate-name "$(echo "$name" | tr - _)" --cfg 'feature="std"' -L "$folder" "$@" \
            --out-dir "$folder" "$source"
    done
}

mkdir -p "$folder"
crate cfg-if 2018
crate crossbeam-utils 2018 --extern cfg_if="$folder/libcfg_if.rlib"
crate crossbeam-channel 2018 --cfg 'feature="crossbeam-utils"' \
    --extern cfg_if="$folder/libcfg_if.rlib" \
    --extern crossbeam_utils="$folder/libcrossbeam_utils.rlib"
rustc --edition 2021 -C opt-level=3 -C panic=abort -L "$folder" \
    --extern crossbeam_channel="$folder/libcrossbeam_channel.rlib" -o "$2" "$1"
