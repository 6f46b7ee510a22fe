#!/bin/sh
# NumPy reads what examples/npz_writer.h has written. NumPy comes from PyPI, into build/numpy, where
# the system's Python has none.
cd "$(dirname "$0")/.." || exit 1
folder=build/numpy_reads
mkdir -p $folder
python=python3
if ! $python -c 'import numpy' 2>/dev/null; then
    python=build/numpy/bin/python
    $python -c 'import numpy' 2>/dev/null ||
        { python3 -m venv build/numpy && build/numpy/bin/pip -q install numpy; } || exit 1
fi
for program in tests/numpy_reads examples/npz_convert; do
    "${CC:-cc}" -std=gnu11 -O1 -I. $program.c -o "$folder/${program##*/}" -pthread || exit 1
done
$folder/numpy_reads $folder && $folder/npz_convert examples/data/digits_test.npz $folder/to.npz &&
    $python tests/numpy_reads.py $folder examples/data/digits_test.npz $folder/to.npz
