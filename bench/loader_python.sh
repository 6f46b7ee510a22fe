#!/bin/sh
# Prints a Python that bench-loader compares with: that of npz_python.sh, with SPDL, Grain and
# PyTorch from PyPI where they can be had; PyTorch is large (5 GB with what it brings). ($PYTHON is
# taken as it is.)
cd "$(dirname "$0")/.." || exit 1
python=$(bench/npz_python.sh) || exit 1
if [ "$python" = build/venv/bin/python ] && [ ! -f build/venv/loader ]; then
    echo "bench-loader: getting spdl, grain and torch (5 GB) from PyPI into build/venv" >&2
    for package in spdl grain torch; do
        "$python" -m pip -q install $package >>build/venv.log 2>&1 ||
            echo "bench-loader: no $package, see build/venv.log" >&2
    done
    touch build/venv/loader
fi
echo "$python"
