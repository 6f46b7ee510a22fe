"""The loaders of Python that bench_peers compares with: PyTorch, SPDL and Grain.

bench_peers starts this program once for each of them, named by $PEER_LIBRARY, and writes lines to
it: LIBRARY ITEMS KIND:LATE_US:PORT:BATCH:WORKERS:WINDOW:STEP_MS:STEP_THREADS:CALL:FOLDER. The
answer is one line: nanoseconds to the first batch, between two batches, of CPU time; MB;
nanoseconds of CPU time since the last answer; the sum. One that begins with ! is why it could not
be done. The first line tells the version, or - for none.

An item is made by peer_work.so, in C and without Python's lock, into an array; CALL 1 makes a whole
batch in one call of the loader. WORKERS 0: the default of the library. .npz files are read by the
loader's own reader, or by NumPy.
"""

import ctypes
import importlib.metadata
import os
import resource
import sys
import time
import warnings

LIBRARY = os.path.join(os.path.dirname(__file__), "../build/bench/peer_work.so")
STORED, DEFLATED, IO = 5, 6, 7  # of peer_kind
SHARDS, SHAPE = 16, (128, 64, 64, 3)
CORES = max(len(os.sched_getaffinity(0)), 2)

work = ctypes.CDLL(LIBRARY)
work.peer_item_bytes.restype = ctypes.c_size_t
work.peer_make.argtypes = [ctypes.c_uint64, ctypes.c_void_p]
work.peer_take.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t]
work.peer_take.restype = ctypes.c_uint64
work.peer_step.argtypes = [ctypes.c_double, ctypes.c_int]


class Job:
    def __init__(self, items, text):
        parts = text.split(":", 9)
        numbers = [int(part) for part in parts[:6] + parts[7:9]]
        self.kind, self.late, self.port, self.batch, self.workers, self.window = numbers[:6]
        self.step_ms, self.step_threads = float(parts[6]), numbers[6]
        self.folder, self.items = parts[9], items
        self.whole = numbers[7] == 1 or self.batch == 1  # batches, one in a call
        self.calls = items // self.batch if self.whole else items
        self.arrays = self.kind in (STORED, DEFLATED)
        work.peer_open(self.folder.encode(), self.kind, self.late, self.port)
        self.bytes = work.peer_item_bytes()

    def path(self, number):
        kind = "stored" if self.kind == STORED else "deflated"
        return f"{self.folder}/npz/{kind}_{number % SHARDS:02}.npz"

    def make(self, number):
        """An item, or a batch of them."""
        import numpy

        if self.arrays:
            with numpy.load(self.path(number)) as file:
                return file["images"]
        count = self.batch if self.whole else 1
        array = numpy.empty((count, self.bytes) if count > 1 else self.bytes, numpy.uint8)
        at = array.ctypes.data
        for i in range(count):
            if not work.peer_make(number * count + i, at + i * self.bytes):
                raise ValueError(f"item {number} was not made")
        return array


def torch_batches(job):
    import torch

    class Dataset:
        def __len__(self):
            return job.calls

        def __getitem__(self, number):
            return torch.from_numpy(job.make(number))

    written = {}
    if job.workers > 0:
        ahead = max(job.window // (job.batch * job.workers), 1)
        written = {"num_workers": job.workers, "prefetch_factor": ahead}
    loader = torch.utils.data.DataLoader(
        Dataset(), batch_size=None if job.whole else job.batch, **written)
    iterator = iter(loader)
    end = iterator._shutdown_workers if job.workers > 0 else lambda: None
    return ((batch.data_ptr(), batch.nbytes, batch) for batch in iterator), end


def arrays_of(iterator):
    return ((array.ctypes.data, array.nbytes, array) for array in iterator)


def spdl_batches(job):
    import numpy
    from spdl.pipeline import PipelineBuilder

    make = job.make
    if job.arrays:
        import spdl.io

        def make(number):
            with open(job.path(number), "rb") as file:
                return spdl.io.load_npz(file.read())["images"]

    builder = PipelineBuilder().add_source(range(job.calls)).pipe(
        make, concurrency=job.workers or 1, output_order="input")
    if not job.whole:
        builder = builder.aggregate(job.batch).pipe(numpy.stack)
    sink = builder.add_sink(max(job.window // job.batch, 1)) if job.workers else builder.add_sink()
    pipeline = sink.build(num_threads=job.workers or CORES)

    def batches():
        with pipeline.auto_stop():
            yield from pipeline

    return arrays_of(batches()), lambda: None


def grain_batches(job):
    import grain

    data = grain.MapDataset.range(job.calls).map(job.make)
    if job.kind == IO:
        options = grain.ReadOptions()
        if job.workers > 0:
            options = grain.ReadOptions(num_threads=job.workers, prefetch_buffer_size=job.window)
        return arrays_of(iter(data.to_iter_dataset(options).batch(job.batch))), lambda: None
    if not job.whole:
        data = data.batch(job.batch)
    ahead = max(job.window // job.batch, 1)
    options = grain.ReadOptions(num_threads=job.workers, prefetch_buffer_size=ahead)
    return arrays_of(iter(data.to_iter_dataset(options))), lambda: None


BATCHES = {"torch": torch_batches, "spdl": spdl_batches, "grain": grain_batches}


def processes():
    """This one and its children."""
    found = [os.getpid()]
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/children") as file:
                found += [int(child) for child in file.read().split()]
        except OSError:  # it has ended
            pass
    return found


def megabytes():
    """The most memory of all of them; what they share is counted once."""
    kib = {}
    for process in processes():
        try:
            for name in ("smaps_rollup", "status"):
                with open(f"/proc/{process}/{name}") as file:
                    for line in file:
                        field = line.split()
                        if field[0] in ("Pss:", "VmHWM:", "VmRSS:"):
                            kib[field[0]] = kib.get(field[0], 0) + int(field[1])
        except OSError:  # it has ended
            pass
    return (kib["Pss:"] + kib["VmHWM:"] - kib["VmRSS:"]) / 1024


def cpu_ns():
    parts = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(part.ru_utime + part.ru_stime for part in parts) * 1e9


def run(library, job):
    """To the first batch, between two batches (see bench_peers.c), CPU time, MB, and the sum."""
    total, begun, cpu, mb = 0, time.perf_counter_ns(), cpu_ns(), 0
    batches, end = BATCHES[library](job)
    count, slots = job.items // job.batch, job.window // job.batch
    since = slots + ((count - 2 * slots) // 3 if job.kind == IO else 0)
    at_batch = {}  # when it came
    for number, (at, size, batch) in enumerate(batches):
        if number in (0, since, count - 1 - slots):
            at_batch[number] = time.perf_counter_ns()
        total = work.peer_take(total, at, size)
        work.peer_step(job.step_ms, job.step_threads)
        if number == count // 2 and library == "torch":  # its workers end by themselves
            mb = megabytes()
        del batch
    mb = max(mb, megabytes())
    end()
    span = at_batch[count - 1 - slots] - at_batch[since]
    return at_batch[0] - begun, span, cpu_ns() - cpu, mb, total


def make_arrays(folder):
    """The .npz files, once."""
    import numpy

    if os.path.exists(f"{folder}/npz/deflated_{SHARDS - 1:02}.npz"):
        return
    os.makedirs(f"{folder}/npz", exist_ok=True)
    for shard in range(SHARDS):
        random = numpy.random.RandomState(shard)
        wave = numpy.cumsum(random.randint(-3, 4, SHAPE), axis=2)
        images = (128 + wave).astype(numpy.uint8)
        numpy.savez(f"{folder}/npz/stored_{shard:02}.npz", images=images)
        numpy.savez_compressed(f"{folder}/npz/deflated_{shard:02}.npz", images=images)


def main():
    library = os.environ["PEER_LIBRARY"]
    log = f"build/peer_rows_{library}.log"
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)  # chatter
    warnings.simplefilter("ignore")
    try:
        print(f"{library} {importlib.metadata.version(library)}", flush=True)
    except importlib.metadata.PackageNotFoundError:
        print("-", flush=True)
    reported = cpu_ns()
    for line in sys.stdin:
        try:
            _, items, what = line.rstrip("\n").split(" ", 2)
            if what.startswith("npz:"):
                make_arrays(what[4:])
                answer = [0, 0, 0, 0, 0]
            else:
                answer = run(library, Job(int(items), what))
            since, reported = reported, cpu_ns()
            own = f" {reported - since:.0f} {answer[4]}"
            answer = "%.0f %.0f %.0f %.1f" % tuple(answer[:4]) + own
        except Exception as error:  # whatever it is, the bench goes on without this peer
            answer = "!" + repr(error).replace("\n", " ")
        print(answer, flush=True)


if __name__ == "__main__":
    main()
