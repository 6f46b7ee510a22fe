"""The readers of Python that bench_npz compares with: numpy.load and load_npz of SPDL (PyPI).

bench_npz starts this program and writes lines to it: OPERATION REPEATS PATH. The answer to each is
one line, the nanoseconds of one repetition, which is timed here. A line beginning with ! is why it
could not be done. The first line tells the versions: "numpy 2.1.0, spdl 0.8.0", or - for none.
"""

import io
import mmap
import sys
import time

import numpy as np

try:
    import importlib.metadata

    import spdl.io

    SPDL = importlib.metadata.version("spdl-io")
except Exception:  # whatever keeps it from loading here
    SPDL = None


def add_up(array):
    """Every byte, eight at a time from the first aligned one: unaligned sums are far slower."""
    data = array.reshape(-1).view(np.uint8)
    skip = -data.__array_interface__["data"][0] % 8
    words = (data.size - skip) // 8
    return int(data[skip : skip + 8 * words].view(np.uint64).sum())


def contents(path):
    with open(path, "rb") as file:
        return file.read()


def numpy_load(path):
    with np.load(path) as z:
        return [z[name] for name in z.files]


def spdl_arrays(data):
    z = spdl.io.load_npz(data)
    return [z[name] for name in z.files]


def spdl_mapped(path):
    with open(path, "rb") as file:
        return spdl_arrays(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


# An operation is given the path, prepares what is not timed, and returns what is.
OPERATIONS = {
    "numpy_load": lambda path: lambda: numpy_load(path),
    "numpy_sum": lambda path: lambda: [add_up(a) for a in numpy_load(path)],
    "numpy_npy": lambda path: lambda: np.load(path),
    "numpy_memory": lambda path: numpy_memory(contents(path)),
    "spdl_load": lambda path: lambda: spdl_arrays(contents(path)),
    "spdl_sum": lambda path: lambda: [add_up(a) for a in spdl_arrays(contents(path))],
    "spdl_mapped_sum": lambda path: lambda: [add_up(a) for a in spdl_mapped(path)],
    "spdl_memory": lambda path: spdl_memory(contents(path)),
    "spdl_npy": lambda path: lambda: spdl.io.load_npy(contents(path)),
    "spdl_npy_memory": lambda path: spdl_npy_memory(contents(path)),
}


def numpy_memory(data):
    return lambda: np.load(io.BytesIO(data))


def spdl_memory(data):
    return lambda: spdl_arrays(data)


def spdl_npy_memory(data):
    return lambda: spdl.io.load_npy(data)


def answer(line):
    operation, repeats, path = line.rstrip("\n").split(" ", 2)
    run = OPERATIONS[operation](path)
    start = time.perf_counter_ns()
    for _ in range(int(repeats)):
        run()
    return (time.perf_counter_ns() - start) / int(repeats)


def main():
    print(f"numpy {np.__version__}" + (f", spdl {SPDL}" if SPDL else ""), flush=True)
    for line in sys.stdin:
        try:
            print("%.1f" % answer(line), flush=True)
        except Exception as error:
            print("!" + repr(error).replace("\n", " "), flush=True)


if __name__ == "__main__":
    main()
