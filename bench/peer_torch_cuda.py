"""What torch needs for the copies of bench_cuda.c: GB/s of pin_memory().to(device) and of .to()
from memory that stays pinned, printed beside our rows.

usage: peer_torch_cuda.py OURS.json    (lines of `make bench-cuda JSON=1 ARGS=slots_`)

Each batch is new memory, as it is when a loader hands it over; the median of 7 runs counts."""

import json
import statistics
import sys
import time


def size_of(case):
    number, unit = case.split("_")[1][:-1], case[-1]
    return int(number) * {"K": 1 << 10, "M": 1 << 20}[unit]


def rate(torch, size, copy):
    """GB/s of copies of one batch each, until a little time has passed."""
    source = torch.randint(0, 255, (size,), dtype=torch.uint8)
    count = max(8, min(2000, (1 << 30) // size // 4))
    runs = []
    for _ in range(7):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            result = copy(source)
        torch.cuda.synchronize()
        runs.append(size * count / (time.perf_counter() - start) / 1e9)
    assert torch.equal(result.cpu(), source)
    return statistics.median(runs)


def torch_rates(size):
    """GB/s of (pin_memory().to(), .to() of pinned memory), or None without torch and a device."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    pinned = {}

    def pin_and_copy(source):
        return source.pin_memory().to("cuda", non_blocking=True)

    def copy_pinned(source):
        if size not in pinned:
            pinned[size] = source.pin_memory()
        return pinned[size].to("cuda", non_blocking=True)

    return rate(torch, size, pin_and_copy), rate(torch, size, copy_pinned)


def main():
    print(f"{'case':<12} {'ours':>8} {'pin_memory().to()':>18} {'ratio':>7} "
          f"{'pinned .to()':>13} {'ratio':>7}  goal")
    with open(sys.argv[1], encoding="utf-8") as rows:
        for line in rows:
            row = json.loads(line)
            size, ours = size_of(row["case"]), row["ours"]
            theirs = torch_rates(size)
            text = f"{row['case']:<12} {ours:8.2f} "
            if theirs is None:
                print(text + f"{'missing':>18} {'':>7} {'missing':>13}")
                continue
            goal = ""
            if size >= 4 << 20:
                goal = ">= 3: " + ("met" if ours / theirs[0] >= 3 else "MISSED")
            print(text + f"{theirs[0]:18.2f} {ours / theirs[0]:7.2f} "
                  f"{theirs[1]:13.2f} {ours / theirs[1]:7.2f}  {goal}")


main()
