"""Adds up what llvm-cov saw of spdl.h in several programs: the branches of the sections crc to npz.

    python3 tests/coverage_npz.py spdl.h FILE      (the JSON of llvm-cov export)
"""

import collections
import json
import re
import sys


def sections(lines):
    """The section of each line, numbered from 1; None outside those that are asked for."""
    now, out = None, [None]
    for line in lines:
        tag = re.match(r"/\* >>([a-z0-9-]+)", line)
        if tag:
            name = tag.group(1)
            on = name == "crc-impl" or (now is not None and name.endswith("-impl"))
            now = name if on else None
        out.append(now)
    return out


def branches(path):
    """How often each condition was true, and false: {(line, column, which): count}. A function is
    there once for every program that includes it, and its copies are added up."""
    taken = collections.Counter()
    with open(path) as file:
        functions = json.load(file)["data"][0]["functions"]
    for function in functions:
        for line, column, _, _, true, false, at, *_ in function["branches"]:
            if function["filenames"][at].endswith("spdl.h"):
                taken[line, column, "true"] += true
                taken[line, column, "false"] += false
    return taken


def main():
    with open(sys.argv[1]) as file:
        lines = file.read().split("\n")
    where = sections(lines)
    total, hit = collections.Counter(), collections.Counter()
    for (line, column, which), count in sorted(branches(sys.argv[2]).items()):
        if where[line] is None:
            continue
        total[where[line]] += 1
        hit[where[line]] += count > 0
        if count == 0:
            print(f"spdl.h:{line}:{column}: never {which}: {lines[line - 1][column - 1 :]}")
    for name in total:
        print(f"{name:16} {hit[name]:5} of {total[name]:5} branches  {hit[name] / total[name]:.1%}")
    share = sum(hit.values()) / max(1, sum(total.values()))
    print(f"{'together':16} {sum(hit.values()):5} of {sum(total.values()):5} branches  {share:.1%}")


if __name__ == "__main__":
    main()
