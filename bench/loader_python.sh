#!/bin/sh
# Prints a Python with the peers of bench_loader: $PYTHON, or one in build/venv-loader, which is
# made here from PyPI. PyTorch is large (5 GB with what it brings); what cannot be had is left out,
# and its rows say so.
cd "$(dirname "$0")/.." || exit 1

has() {
    [ -n "$1" ] && "$1" -c "import $2" >/dev/null 2>&1
}

make_venv() {
    venv=build/venv-loader
    [ -x $venv/bin/pip ] || python3 -m venv $venv || return
    for package in numpy spdl grain torch; do
        "$venv/bin/pip" -q install $package || echo "bench-loader: no $package"
    done
    touch $venv/tried
}

mkdir -p build
if has "$PYTHON" numpy; then
    echo "$PYTHON"
    exit 0
fi
if [ ! -f build/venv-loader/tried ]; then
    echo "bench-loader: getting numpy, spdl, grain and torch from PyPI into build/venv-loader" >&2
    make_venv >build/venv-loader.log 2>&1
    grep '^bench-loader: no ' build/venv-loader.log >&2
fi
for python in build/venv-loader/bin/python python3; do
    if has "$python" numpy; then
        echo "$python"
        exit 0
    fi
done
echo "bench-loader: no NumPy (apt-get install python3-numpy), see build/venv-loader.log" >&2
exit 1
