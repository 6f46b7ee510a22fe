"""The samplers of Python that bench_sampler compares with, SPDL's and Grain's (PyPI).

bench_sampler starts this program. The first line tells versions, "spdl 0.8.0, grain 0.2.18", or -;
the second one the library with Grain's index_shuffle, which bench_sampler calls itself, or -. Then
lines are read, OPERATION REPEATS COUNT, and each is answered by the nanoseconds of one repetition,
that is of an epoch of COUNT indices, or by bytes. A line beginning with ! says why there is none.
"""

import importlib.metadata
import pathlib
import sys
import time
import tracemalloc

import numpy as np


def version(package, module):
    try:
        __import__(module)
        return importlib.metadata.version(package)
    except Exception:  # whatever keeps it from loading here
        return None


SPDL = version("spdl-core", "spdl.source")
GRAIN = version("grain", "grain")


def epoch(sampler):
    if hasattr(sampler, "shuffle"):
        sampler.shuffle(seed=1)
    for _ in sampler:
        pass


def spdl_random(count, **more):
    from spdl.source import DistributedRandomSampler

    return DistributedRandomSampler(count, rank=0, world_size=1, **more)


def spdl_in_order(count):
    from spdl.source import DistributedDeterministicSampler

    return DistributedDeterministicSampler(count, rank=0, world_size=1)


def weighted(count):
    return spdl_random(count, weights=(np.arange(count) % 10 + 1.0).tolist())


# An operation is given the count, prepares what is not timed, and returns what is.
OPERATIONS = {
    "shuffled": lambda count: lambda: epoch(spdl_random(count)),
    "in_order": lambda count: lambda: epoch(spdl_in_order(count)),
    "weighted": lambda count: (lambda sampler: lambda: epoch(sampler))(weighted(count)),
}


def peak_bytes(count):
    """What the second epoch holds at its begin; Python's own list of indices is not made."""
    tracemalloc.start()
    sampler = spdl_random(count)
    sampler.shuffle(seed=1)
    next(iter(sampler))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def answer(line):
    operation, repeats, count = line.split()
    if operation == "bytes":
        return peak_bytes(int(count))
    run = OPERATIONS[operation](int(count))
    start = time.perf_counter_ns()
    for _ in range(int(repeats)):
        run()
    return (time.perf_counter_ns() - start) / int(repeats)


def main():
    names = [f"{n} {v}" for n, v in (("spdl", SPDL), ("grain", GRAIN)) if v]
    print(", ".join(names) or "-", flush=True)
    library = "-"
    if GRAIN:
        root = pathlib.Path(sys.modules["grain"].__file__).parent
        library = next(map(str, root.rglob("libindex_shuffle.so")), "-")
    print(library, flush=True)
    for line in sys.stdin:
        try:
            print("%.1f" % answer(line), flush=True)
        except Exception as error:
            print("!" + repr(error).replace("\n", " "), flush=True)


if __name__ == "__main__":
    main()
