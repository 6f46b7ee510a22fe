#!/bin/sh
# Prints a Python that has NumPy, and SPDL where it can be had: $PYTHON, or one in build/venv, which
# is made here from PyPI when it is not there, or else that of the system.
cd "$(dirname "$0")/.." || exit 1

has() {
    [ -n "$1" ] && "$1" -c "import $2" >/dev/null 2>&1
}

make_venv() {
    python3 -m venv build/venv && build/venv/bin/pip -q install numpy || return 1
    build/venv/bin/pip -q install spdl
} >build/venv.log 2>&1

mkdir -p build
for python in "$PYTHON" build/venv/bin/python; do
    if has "$python" numpy; then
        echo "$python"
        exit 0
    fi
done
echo "bench-npz: getting numpy and spdl from PyPI into build/venv" >&2
make_venv
for python in build/venv/bin/python python3; do
    if has "$python" numpy; then
        echo "$python"
        exit 0
    fi
done
echo "bench-npz: no NumPy (apt-get install python3-numpy), see build/venv.log" >&2
exit 1
