"""The pipelines of Python that bench_pipeline compares with: SPDL and the DataLoader of PyTorch.

bench_pipeline starts this program and writes lines to it: OPERATION ITEMS -. The answer to each is
one line, the nanoseconds per item from the first item to the last. A line beginning with ! is why
it could not be done. The first line tells the versions: "spdl 0.8.0, torch 2.9.0", or - for none.
"""

import importlib.metadata
import os
import sys
import time
import warnings

STAGES = 3
WORKERS = min(max(len(os.sched_getaffinity(0)), 2), 64)  # as bench_pipeline.c has
CONCURRENCY = WORKERS
BUFFER_SIZE = 16


def version_of(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def noop(item):
    return item


class Items:
    """Calls the stages in the process of the worker, as a dataset does."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, item):
        for _ in range(STAGES):
            item = noop(item)
        return item


def drain(iterator, count):
    """Nanoseconds per item; the items come in order."""
    first = next(iterator)
    start = time.perf_counter_ns()
    rest = list(iterator)
    elapsed = time.perf_counter_ns() - start
    if [first, *rest] != list(range(count)):
        raise ValueError("these are not the items")
    return elapsed / (count - 1)


def spdl_noop3(count):
    from spdl.pipeline import PipelineBuilder

    builder = PipelineBuilder().add_source(range(count))
    for _ in range(STAGES):
        builder = builder.pipe(noop, concurrency=CONCURRENCY, output_order="input")
    pipeline = builder.add_sink(BUFFER_SIZE).build(num_threads=WORKERS)
    with pipeline.auto_stop():
        return drain(iter(pipeline), count)


def torch_noop3(count):
    from torch.utils.data import DataLoader

    loader = DataLoader(
        Items(count), batch_size=None, num_workers=WORKERS, prefetch_factor=BUFFER_SIZE
    )
    return drain(iter(loader), count)


OPERATIONS = {"spdl_noop3": spdl_noop3, "torch_noop3": torch_noop3}


def main():
    warnings.simplefilter("ignore")  # of torch, that there are more workers than cores
    there = [(name, version_of(name)) for name in ("spdl", "torch")]
    print(", ".join(f"{name} {v}" for name, v in there if v) or "-", flush=True)
    for line in sys.stdin:
        operation, count, _ = line.split()
        try:
            print(OPERATIONS[operation](int(count)), flush=True)
        except Exception as error:  # whatever it is, the bench goes on without this peer
            print("!" + repr(error).replace("\n", " "), flush=True)


if __name__ == "__main__":
    main()
