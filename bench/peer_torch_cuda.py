"""What torch needs for the copies of bench_cuda.c: GB/s, and milliseconds of CPU per GiB, of
pin_memory().to(device) and of .to() from memory that stays pinned, beside our rows.

usage: peer_torch_cuda.py OURS.json    (lines of `make bench-cuda JSON=1 ARGS=slots_`)

Each copy takes the next of several sources, in all more than the caches of the processor hold: the
batches of a loader are not in a cache either. The median of 7 runs counts. Goals from 4 MiB on:
at least the rate of pin_memory().to(), with at most a fifth of its CPU."""

import json
import statistics
import sys
import time

SOURCES = 1 << 30  # bytes of all sources


def size_of(case):
    number, unit = case.split("_")[-1][:-1], case[-1]
    return int(number) * {"K": 1 << 10, "M": 1 << 20}[unit]


def measure(torch, sources, copy):
    """(GB/s, CPU milliseconds per GiB) of copies of one batch each."""
    size = sources[0].numel()
    count = max(8, min(2000, (1 << 30) // size // 4))
    rates, cpus, at = [], [], 0
    for _ in range(7):
        torch.cuda.synchronize()
        start, cpu = time.perf_counter(), time.process_time()
        for _ in range(count):
            at = (at + 1) % len(sources)
            result = copy(sources[at])
        torch.cuda.synchronize()
        rates.append(size * count / (time.perf_counter() - start) / 1e9)
        cpus.append((time.process_time() - cpu) * 1e3 / (size * count / 2**30))
    assert torch.equal(result.cpu(), sources[at].cpu())
    return statistics.median(rates), statistics.median(cpus)


def slices(memory, size):
    return [memory[at:at + size] for at in range(0, SOURCES, size)]


def torch_sides(sizes):
    """Both measurements of each size; nothing without torch and a device."""
    try:
        import torch
    except ImportError:
        return {}
    if not torch.cuda.is_available():
        return {}
    memory = torch.randint(0, 255, (SOURCES,), dtype=torch.uint8)
    pinned = memory.pin_memory()

    def pin_and_copy(source):
        return source.pin_memory().to("cuda", non_blocking=True)

    def copy_pinned(source):
        return source.to("cuda", non_blocking=True)

    return {size: (measure(torch, slices(memory, size), pin_and_copy),
                   measure(torch, slices(pinned, size), copy_pinned)) for size in sizes}


def verdict(rate, cpu):
    """Of ratios to pin_memory().to(), more is better."""
    return ("rate >= 1: " + ("met" if rate >= 1 else "MISSED") +
            ", CPU a fifth: " + ("met" if cpu >= 5 else "MISSED"))


def main():
    ours = {}
    with open(sys.argv[1], encoding="utf-8") as rows:
        for line in rows:
            row = json.loads(line)
            if row.get("case", "").startswith("slots_"):
                ours[row["case"]] = row["ours"]
    print(f"{'case':<11} {'GB/s':>6} {'ms/GiB':>7} {'pin_memory().to()':>18} {'ms/GiB':>7} "
          f"{'pinned .to()':>13} {'ms/GiB':>7}  goal")
    cases = [case for case in ours if not case.startswith("slots_cpu")]
    sides = torch_sides([size_of(case) for case in cases])
    for case in cases:
        size, rate = size_of(case), ours[case]
        cpu = ours.get(case.replace("slots", "slots_cpu"))
        text = f"{case:<11} {rate:6.2f} {f'{cpu:.2f}' if cpu else '-':>7} "
        if size not in sides:
            print(text + f"{'missing':>18} {'':>7} {'missing':>13}")
            continue
        (pins, pins_cpu), (pinned, pinned_cpu) = sides[size]
        goal = verdict(rate / pins, pins_cpu / max(cpu, 1e-3)) if cpu and size >= 4 << 20 else ""
        print(text + f"{pins:18.2f} {pins_cpu:7.2f} {pinned:13.2f} {pinned_cpu:7.2f}  {goal}")


main()
