"""The loaders of Python that bench_loader compares with: a multiprocessing.Queue, SPDL's arena,
the DataLoader of PyTorch, and Grain.

bench_loader starts this program and writes lines to it: OPERATION COUNT BYTES:ROUNDS:BATCH. The
answer is one line, the nanoseconds per batch; one that begins with ! is why it could not be done.
The first line tells the versions: "spdl 0.8.0, torch 2.9.0", or - for none.

A loader stays from one line to the next of the same kind, so that no start is timed; then so many
batches as may have been ready are taken before the clock starts. Items are made by loader_work.h,
in new arrays, as by a decoder; with 0 rounds there is one array, made before. BATCH is 0 for items
that are batches already.
"""

import ctypes
import importlib.metadata
import os
import sys
import time
import warnings

WORKERS = min(max(len(os.sched_getaffinity(0)), 2), 64)  # as bench_loader.c has
READY = 4  # batches that may wait, for each worker
LIBRARY = os.path.join(os.path.dirname(__file__), "../build/bench/loader_work.so")
FOREVER = 1 << 40


class Make:
    """Makes item i: an array of bytes."""

    def __init__(self, size, rounds):
        self.size, self.rounds, self.made, self.work = size, rounds, None, None

    def __getstate__(self):
        return {"size": self.size, "rounds": self.rounds, "made": None, "work": None}

    def __call__(self, number):
        import numpy

        if self.work is None:
            self.work = ctypes.CDLL(LIBRARY).work
            self.work.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_int]
        if self.made is not None:
            return self.made
        array = numpy.empty(self.size, numpy.uint8)
        self.work(array.ctypes.data, self.size, number, max(self.rounds, 1))
        if self.rounds == 0:
            self.made = array
        return array


def mp_queue_fill(queue, make):
    for number in range(FOREVER):
        queue.put(make(number))


def mp_queue(make, batch):
    import multiprocessing

    context = multiprocessing.get_context("fork")
    queue = context.Queue(READY)
    process = context.Process(target=mp_queue_fill, args=(queue, make), daemon=True)
    process.start()

    def end():
        process.kill()
        process.join()

    return (queue.get() for _ in range(FOREVER)), end, READY + 2


class Items:
    """What iterate_in_subprocess iterates in its process."""

    def __init__(self, make):
        self.make = make

    def __iter__(self):
        return map(self.make, range(FOREVER))


def spdl_with(arena, make):
    from spdl.pipeline import iterate_in_subprocess

    iterator = iter(iterate_in_subprocess(lambda: Items(make), buffer_size=READY, arena=arena,
                                          mp_context="fork", daemon=True))
    return iterator, iterator.close, READY + 2


def spdl_pool(make, batch):
    from spdl.pipeline import SharedMemorySegmentPool

    return spdl_with(SharedMemorySegmentPool(make.size + 4096, READY + 4), make)


def spdl_ring(make, batch):
    from spdl.pipeline import SharedMemoryRingBuffer

    return spdl_with(SharedMemoryRingBuffer((make.size + 4096) * (READY + 2)), make)


def torch_item(array):
    import torch

    return torch.from_numpy(array)


class Dataset:
    def __init__(self, make):
        self.make = make

    def __len__(self):
        return FOREVER

    def __getitem__(self, number):
        return torch_item(self.make(number))


def torch_loader(make, batch):
    from torch.utils.data import DataLoader

    loader = DataLoader(Dataset(make), batch_size=batch or None, num_workers=WORKERS,
                        prefetch_factor=READY)
    iterator = iter(loader)
    return iterator, iterator._shutdown_workers, READY * WORKERS + 2


def grain_loader(make, batch):
    import grain

    source = grain.MapDataset.range(FOREVER).map(make)
    if batch:
        source = source.batch(batch)
    options = grain.MultiprocessingOptions(num_workers=WORKERS, per_worker_buffer_size=READY)
    iterator = iter(source.to_iter_dataset().mp_prefetch(options))
    return iterator, iterator.close, (READY + 1) * WORKERS + 2


OPERATIONS = {"mp_queue": mp_queue, "spdl_pool": spdl_pool, "spdl_ring": spdl_ring,
              "torch": torch_loader, "grain": grain_loader}


def last_word(data):
    """That of the last item of a batch, as loader_work.h writes it."""
    import numpy

    row = numpy.asarray(data).reshape(-1)
    return int(row[-8:].view(numpy.uint64)[0]) ^ ((1 << 64) - 1)


class Running:
    """The loader of the last line."""

    def __init__(self):
        self.key = self.iterator = self.end = None

    def stop(self):
        self.key = self.iterator = None
        if self.end is not None:
            end, self.end = self.end, None
            end()

    def take(self, count):
        """Takes so many batches, which come in order; what it holds goes before the next."""
        for _ in range(count):
            data = next(self.iterator)
            number = last_word(data)
            if self.make.rounds and number != (self.taken + 1) * self.step - 1:
                raise ValueError(f"batch {self.taken} ends with item {number}")
            self.taken += 1
            del data

    def ns(self, operation, count, what):
        if self.key != (operation, what):
            self.stop()
            size, rounds, batch = map(int, what.split(":"))
            self.make, self.step, self.taken = Make(size, rounds), batch or 1, 0
            self.iterator, self.end, self.ready = OPERATIONS[operation](self.make, batch)
            self.key = (operation, what)
        self.take(self.ready)
        start = time.perf_counter_ns()
        self.take(count)
        return (time.perf_counter_ns() - start) / count


def version_of(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main():
    os.setpgid(0, 0)
    os.dup2(os.open("build/loader_peers.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)  # chatter
    warnings.simplefilter("ignore")  # of torch, that there are more workers than cores
    there = [(name, version_of(name)) for name in ("numpy", "spdl", "torch", "grain")]
    print(", ".join(f"{name} {v}" for name, v in there if v) or "-", flush=True)
    running = Running()
    for line in sys.stdin:
        try:
            operation, count, what = line.split()
            if operation == "group":  # of the processes
                answer = str(os.getpgrp())
            elif operation == "stop":
                running.stop()
                answer = "0"
            else:
                answer = str(running.ns(operation, int(count), what))
        except Exception as error:  # whatever it is, the bench goes on without this peer
            answer = "!" + repr(error).replace("\n", " ")
        print(answer, flush=True)
    running.stop()


if __name__ == "__main__":
    main()
