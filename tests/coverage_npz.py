"""Adds up what gcov saw of spdl.h in several programs: the branches of the sections crc to npz.

    python3 tests/coverage_npz.py spdl.h FILE      (the JSON of gcov, one object per line)
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
    """How often each branch was taken: {(line, number): count}."""
    taken = collections.Counter()
    with open(path) as file:
        for text in file:
            for source in json.loads(text)["files"]:
                if not source["file"].endswith("spdl.h"):
                    continue
                for line in source["lines"]:
                    for number, branch in enumerate(line["branches"]):
                        taken[line["line_number"], number] += branch["count"]
    return taken


def main():
    with open(sys.argv[1]) as file:
        lines = file.read().split("\n")
    where = sections(lines)
    total, hit = collections.Counter(), collections.Counter()
    missed = collections.defaultdict(list)
    for (line, number), count in sorted(branches(sys.argv[2]).items()):
        if where[line] is None:
            continue
        total[where[line]] += 1
        hit[where[line]] += count > 0
        if count == 0:
            missed[line].append(number)
    for line, numbers in missed.items():
        print(f"spdl.h:{line}: {len(numbers)} never taken: {lines[line - 1].strip()}")
    for name in total:
        print(f"{name:16} {hit[name]:5} of {total[name]:5} branches  {hit[name] / total[name]:.1%}")
    share = sum(hit.values()) / max(1, sum(total.values()))
    print(f"{'together':16} {sum(hit.values()):5} of {sum(total.values()):5} branches  {share:.1%}")


if __name__ == "__main__":
    main()
