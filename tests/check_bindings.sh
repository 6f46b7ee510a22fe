#!/bin/sh
# The declarations of spdl.h are plain C for tools that make bindings: pycparser reads them, cffi
# makes bindings, and a pipeline runs with those. Both come from PyPI, into build/bindings.
cd "$(dirname "$0")/.." || exit 1
folder=build/bindings
python=$folder/venv/bin/python
$python -c 'import cffi, pycparser' 2>/dev/null ||
    { python3 -m venv $folder/venv && $folder/venv/bin/pip -q install cffi pycparser; } || exit 1
"${CC:-cc}" -std=c99 -E -P '-D__attribute__(x)=' -D__extension__= -x c spdl.h >$folder/spdl.i &&
    "${CC:-cc}" -O1 -fPIC -shared -DSPDL_IMPLEMENTATION -x c spdl.h -o $folder/libspdl.so \
        -lpthread -lm || exit 1
if $python tests/bindings.py $folder/spdl.i $folder/libspdl.so; then
    echo "1 passed, 0 failed"
else
    echo "0 passed, 1 failed"
    exit 1
fi
