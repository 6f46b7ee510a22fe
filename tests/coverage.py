"""Adds up what llvm-cov saw of the headers in several programs, and compares what no test took with
the reasons in tests/uncovered.md.

    python3 tests/coverage.py FILE [--all] [SECTION ...]      (FILE: the JSON of llvm-cov export)
"""

import collections
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
HEADERS = "spdl.h", "spdl_cuda.h"
LEAST = 0.95


def places(lines):
    """Section and function of each line, numbered from 1."""
    section, function, out = None, "", [(None, "")]
    for line in lines:
        tag = re.match(r"/\* >>([a-z0-9-]+)", line)
        if tag:
            section = tag.group(1)
        name = re.match(r"SPDL_\w+ .*?(spdl_\w+)\(", line)
        if name:
            function = name.group(1)
        out.append((section, function))
    return out


def branches(path):
    """How often each condition was true, and false: {(header, line, column, which): count}. A
    function is there once for every program that includes it, and its copies are added up."""
    taken = collections.Counter()
    with open(path) as file:
        functions = json.load(file)["data"][0]["functions"]
    for function in functions:
        for line, column, _, _, true, false, at, *_ in function["branches"]:
            header = function["filenames"][at].rsplit("/", 1)[-1]
            if header in HEADERS:
                taken[header, line, column, "true"] += true
                taken[header, line, column, "false"] += false
    return taken


def reasons():
    """Branches that no test takes and need not: (function or section, part of the code, which,
    reason)."""
    out, known = [], ROOT / "tests" / "uncovered.md"
    for line in known.read_text().split("\n") if known.exists() else []:
        row = re.match(r"\| ([\w-]+) \| `(.*)` \| (true|false|any) \| (.*) \|$", line)
        if row:
            out.append((row.group(1), row.group(2).replace("\\|", "|"), row.group(3), row.group(4)))
    return out


def reason(known, section, function, code, which):
    """Why this branch need not be taken, or None."""
    for where, part, side, why in known:
        if where in (section, function) and (part == "*" or code.startswith(part)) \
                and side in (which, "any"):
            return why
    return None


def main():
    words = [word for word in sys.argv[2:] if word != "--all"]
    known, taken = reasons(), branches(sys.argv[1])
    total, hit, excused, bare = (collections.Counter() for _ in range(4))
    for header in HEADERS:
        lines = (ROOT / header).read_text().split("\n")
        where = places(lines)
        for (of, line, column, which), count in sorted(taken.items()):
            section, function = where[line] if of == header else (None, "")
            if section is None or (words and section not in words):
                continue
            key = header, section
            total[key] += 1
            hit[key] += count > 0
            if count > 0:
                continue
            code = lines[line - 1][column - 1 :].strip()
            why = reason(known, section, function, code, which)
            excused[key] += why is not None
            bare[key] += why is None
            if why is None or "--all" in sys.argv:
                print(f"{header}:{line}:{column}: {function}: never {which}: {code}"
                      + (f" ({why})" if why else ""))
    for header, section in total:
        key = header, section
        print(f"{header:12} {section:17} {hit[key]:5} of {total[key]:5} branches "
              f"{hit[key] / total[key]:6.1%}, {excused[key]} with a reason, {bare[key]} without")
    passed = failed = 0
    for header in HEADERS:
        all_of = sum(n for key, n in total.items() if key[0] == header)
        met = sum(n for key, n in hit.items() if key[0] == header)
        left = sum(n for key, n in excused.items() if key[0] == header)
        if all_of == 0:
            continue
        print(f"{header}: {met} of {all_of} branches are taken ({met / all_of:.1%}), {left} more "
              "have a reason")
        passed += met / all_of >= LEAST
        failed += met / all_of < LEAST
    print(f"{passed} passed, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
