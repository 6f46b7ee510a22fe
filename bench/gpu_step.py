"""bench/gpu_step.c in PyTorch: a DataLoader whose workers call the same decoder in C, pin_memory,
.to(non_blocking), and products of matrices of the same size, one of them the batch.

usage: gpu_step.py WORK.so FOLDER    (with the variables of gpu_step.c; FOLDER has its JPEGs)

CPU time is of this process and its workers. Without a device a step sleeps: that shows that this
program runs, and nothing else."""

import ctypes
import os
import sys
import time

BATCH, SIDE, JPEG = 32, 1024, 0
TICK = os.sysconf("SC_CLK_TCK")

try:
    import torch
    from torch.utils.data import DataLoader, Dataset
except ImportError:
    print("no torch here (pip install torch): its rows are missing")
    sys.exit(0)

work = ctypes.CDLL(os.path.abspath(sys.argv[1]))
work.peer_item_bytes.restype = ctypes.c_size_t
work.peer_make.argtypes = [ctypes.c_uint64, ctypes.c_void_p]
work.peer_open(sys.argv[2].encode(), JPEG, 0, 0)
ITEM = work.peer_item_bytes()
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


def numbers(name, others):
    return [float(part) for part in os.environ.get(name, others).split()]


def synchronize():
    if CUDA:
        torch.cuda.synchronize()


class Images(Dataset):
    def __len__(self):
        return 1 << 24

    def __getitem__(self, number):
        item = torch.empty(ITEM, dtype=torch.uint8)
        if not work.peer_make(number, item.data_ptr()):
            raise ValueError(f"item {number} was not made")
        return item


class Model:
    def __init__(self):
        self.b = torch.zeros(SIDE, SIDE, device=DEVICE)
        self.c = torch.zeros(SIDE, SIDE, device=DEVICE)
        self.one_ms = None
        if CUDA:
            self.one_ms = self.alone(1, 500)

    def products(self, ms):
        return 1 if self.one_ms is None else max(round(ms / self.one_ms), 1)

    def step(self, a, ms):
        if not CUDA:
            time.sleep(ms / 1e3)
            return
        for _ in range(self.products(ms)):
            torch.mm(a, self.b, out=self.c)

    def alone(self, ms, steps):
        """Milliseconds of a step without a loader."""
        self.step(self.b, ms)
        synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            self.step(self.b, ms)
        synchronize()
        return (time.perf_counter() - start) * 1e3 / steps


def cpu_seconds(workers):
    total = time.process_time()
    for worker in workers:
        with open(f"/proc/{worker.pid}/stat", encoding="utf-8") as stat:
            fields = stat.read().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / TICK
    return total


def check(batch, expected):
    assert torch.equal(batch.cpu().view(-1), expected), "a batch is not what was loaded"


def point(model, workers, ms, alone_ms, seconds):
    images = Images()
    expected = torch.cat([images[i] for i in range(BATCH)])
    loader = DataLoader(images, batch_size=BATCH, num_workers=workers, pin_memory=CUDA)
    batches = iter(loader)
    events = []

    def one():
        batch = next(batches).to(DEVICE, non_blocking=True)
        model.step(batch.view(-1)[:4 * SIDE * SIDE].view(torch.float32).view(SIDE, SIDE), ms)
        if CUDA:  # not more than three steps ahead of the device
            events.append(torch.cuda.Event())
            events[-1].record()
            if len(events) > 3:
                events.pop(0).synchronize()
        return batch

    check(one(), expected)
    start = time.perf_counter()
    count = 0
    while count < 8 or time.perf_counter() - start < seconds / 4:
        one()
        count += 1
    start, cpu, count = time.perf_counter(), cpu_seconds(batches._workers), 0
    while time.perf_counter() - start < seconds:
        one()
        count += 1
    synchronize()
    rate = count / (time.perf_counter() - start)
    cpu = (cpu_seconds(batches._workers) - cpu) * 1e3 / count
    print(f"torch  {workers:2d} workers, step {ms:2.0f} ms: {rate:7.1f} steps/s, "
          f"{rate * alone_ms / 1e3:.2f} of the step alone, CPU {cpu:.1f} ms a batch", flush=True)


def main():
    seconds = numbers("STEP_SECONDS", "4")[0]
    if not CUDA:
        print("SIMULATION: torch sees no GPU; the figures say nothing about any device")
    model = Model()
    for ms in numbers("STEP_MS", "1 5 20"):
        alone_ms = model.alone(ms, int(300 / ms) + 5)
        print(f"a step of {ms:.0f} ms alone: {alone_ms:.3f} ms, {model.products(ms)} products",
              flush=True)
        for workers in numbers("STEP_WORKERS", "1 2 4 8 15"):
            if workers <= len(os.sched_getaffinity(0)):
                point(model, int(workers), ms, alone_ms, seconds)


main()
