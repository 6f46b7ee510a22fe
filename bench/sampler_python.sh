#!/bin/sh
# Prints a Python that bench-sampler compares with: that of npz_python.sh, with SPDL's samplers and
# Grain from PyPI where they can be had. ($PYTHON is taken as it is.)
cd "$(dirname "$0")/.." || exit 1
python=$(bench/npz_python.sh) || exit 1
if [ "$python" = build/venv/bin/python ] && ! "$python" -c "import grain, spdl.source" 2>/dev/null
then
    echo "bench-sampler: getting grain and spdl-core from PyPI into build/venv" >&2
    build/venv/bin/pip -q install grain spdl-core >>build/venv.log 2>&1
fi
echo "$python"
