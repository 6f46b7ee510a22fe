#!/usr/bin/env python3
"""Which memory orders of the pipeline does the explorer miss when they are weak?

usage: mutate_engine.py [--runs N] [WORD ...] PROGRAM
Weakens the orders of PROGRAM (build/explore/futex) one at a time: a load, store or change is
relaxed, a fence is left out. An order was noticed if one of the 32 scenarios that use it most fails
within N (300) schedules. The others are missed; tests/mutants.md has reasons for those that are
known, as `function helper helper ...`. A reason for an order that the program does not have is
stale, an error as well. WORD: only places with such a word. Two at a time.
"""
import argparse
import pathlib
import re
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCENARIOS = 32


def run(program, *args):
    return subprocess.run([program, *map(str, args)], capture_output=True, text=True)


def reached(program):
    """{address: order}, and [(name of a scenario, {address: how much it depends on the order})]."""
    orders, scenarios = {}, []
    for name in run(program, "--list").stdout.split("\n"):
        with tempfile.NamedTemporaryFile("r") as file:
            if not name:
                continue
            if run(program, "--runs", 500, "--sites", file.name, "=" + name).returncode:
                raise SystemExit(f"{name}: this scenario fails although no order is weak")
            reach = {}
            for line in file:
                address, order, ran, old, news = line.split()
                orders[address] = int(order)
                reach[address] = int(ran) + 100 * int(old) + 100 * int(news)
            scenarios.append((name, reach))
    return orders, scenarios


def places(program, orders):
    """{(line, function, helper): [addresses]}; helpers are those of the atomics."""
    lines = (ROOT / "spdl.h").read_text().split("\n")
    begin = next(i for i, line in enumerate(lines) if "/* >>atomics-impl" in line) + 1
    end = next(i for i, line in enumerate(lines) if i > begin and "/* >>" in line) + 1
    strong = [address for address, order in orders.items() if order]
    named = subprocess.run(["addr2line", "-afis", "-e", program, *strong], capture_output=True,
                           text=True).stdout
    found = {}
    for text in re.split(r"^0x", named, flags=re.M)[1:]:
        address, *frames = text.strip().split("\n")
        helper = "?"
        for function, where in zip(frames[::2], frames[1::2]):
            file, line = where.split(" ")[0].split(":")
            if file != "spdl.h":
                break
            if not begin <= int(line) < end:
                key = int(line), function.replace("spdl__", ""), helper
                found.setdefault(key, []).append(address.lstrip("0"))
                break
            helper = function.replace("spdl__", "")
    return found


def reasons():
    """{(function, helper)} of the orders that tests/mutants.md has reasons for."""
    orders = (ROOT / "tests" / "mutants.md").read_text().split("# Memory orders ")[1]
    known = set()
    for place in re.findall(r"`([^`]*)`", orders[orders.index("\n|"):]):
        function, *helpers = place.split()
        known |= {(function, helper) for helper in helpers}
    return known


def weaken(program, addresses, scenarios, runs):
    """How it was noticed, or None."""
    weight = [(sum(reach.get(address, 0) for address in addresses), name)
              for name, reach in scenarios]
    names = ["=" + name for n, name in sorted(weight, reverse=True)[:SCENARIOS] if n]
    result = run(program, "--first", "--runs", 10 * runs, "--weaken", ",".join(addresses),
                 *names)
    if result.returncode == 0:
        return None
    why = re.search(r"^BAD (.*?)  .*\n +(.*?);", result.stdout, re.M)
    return f"{why[1]}: {why[2]}" if why else f"exit {result.returncode}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("words", nargs="*")
    parser.add_argument("program")
    args = parser.parse_intermixed_args()
    orders, scenarios = reached(args.program)
    found = places(args.program, orders)
    todo = sorted((key, addresses) for key, addresses in found.items()
                  if not args.words or any(word in f"{key[1]} {key[2]}" for word in args.words))
    known = reasons()
    stale = sorted(known - {key[1:] for key in found})
    for place in stale:
        print("stale    tests/mutants.md:", *place)
    counts = {"noticed": 0, "reason": 0, "missed": 0}

    def judge(item):
        (line, function, helper), addresses = item
        why = weaken(args.program, addresses, scenarios, args.runs)
        reason = (function, helper) in known
        verdict = "noticed" if why else "reason" if reason else "missed"
        counts[verdict] += 1
        print(f"{verdict:8} spdl.h:{line} {function} {helper}{': ' + why if why else ''}",
              flush=True)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(judge, todo))
    print(f"{len(todo)} orders: {counts['noticed']} noticed, {counts['reason']} missed, with "
          f"a reason; {counts['missed']} missed; {len(stale)} stale reasons")
    return counts["missed"] + len(stale) > 0


if __name__ == "__main__":
    raise SystemExit(main())
