"""Faults of the system at points drawn by chance, in the calls of the library alone: memory,
threads, files, maps, futexes and so on fail once, or from one call on. Examples and random
pipelines (tests/test_chance.c) have to finish or to give a sentence: no crash, no hang, and of the
random ones no leak.

    python3 tests/torture_faults.py [--points 2000] [--seed 1] [--jobs 2] [NAME ...]

tests/coverage.sh has other --flags than those of sanitizers, and a folder of its own.
"""

import argparse
import concurrent.futures
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
SANITIZERS = "-g1 -fsanitize=address,undefined -fno-sanitize-recover=undefined"
BUILD = None
EXAMPLES = ("branch_merge cache loader_process loaders_in_turn mix mixture npz_convert "
            "npz_rows quickstart resume ring_batches ring_spsc stats_report tokens trace "
            "webdataset weighted").split()
ARGUMENTS = {"npz_convert": ["examples/data/digits_test.npz", "stored.npz"]}
PROGRAMS = 200  # random pipelines
LIMIT = 60  # seconds
# What the implementation includes, and examples use.
HEADERS = "errno.h fcntl.h stdio.h stdlib.h string.h sys/stat.h time.h unistd.h".split()


def run(*command, **more):
    subprocess.run(command, cwd=ROOT, check=True, **more)


def strike(path):
    """The calls of the object become those of tests/faults.c."""
    wrapped = re.findall(r"\bfault_(\w+)\(", (ROOT / "tests/faults.c").read_text())
    names = [f"--redefine-sym={name}=fault_{name}" for name in sorted(set(wrapped))]
    run("objcopy", *names, path)


def build(names, more):
    BUILD.mkdir(parents=True, exist_ok=True)
    flags = ["-O0", "-w", "-pthread", "-std=gnu11", *more.split()]
    unit = BUILD / "library.c"
    unit.write_text('#define SPDL_IMPLEMENTATION\n#include "spdl.h"\n')
    for source, to in ((unit, "library.o"), ("tests/library.c", "tested.o")):
        run("clang", *flags, "-I.", "-c", source, "-o", BUILD / to)
        strike(BUILD / to)
    run("clang", "-O1", "-pthread", "-c", "tests/faults.c", "-o", BUILD / "faults.o")
    run("clang", *flags, "-DWILD_FAULTS", "tests/main.c", "tests/test_chance.c", BUILD / "tested.o",
        BUILD / "faults.o", "-o", BUILD / "chance", "-lm")
    for header in HEADERS:
        flags += ["-include", header]
    for name in names:
        text = (ROOT / f"examples/{name}.c").read_text()
        copy = BUILD / f"{name}.c"
        copy.write_text(text.replace("#define SPDL_IMPLEMENTATION", ""))
        run("clang", *flags, "-I.", "-Iexamples", copy, BUILD / "library.o", BUILD / "faults.o",
            "-o", BUILD / name, "-lm")


def attempt(name, fault=None, counts=None):
    """Runs a program: its status, None for a hang, and what it printed."""
    env = dict(os.environ, ASAN_OPTIONS="exitcode=99:detect_leaks=0", UBSAN_OPTIONS="exitcode=99")
    command = [BUILD / name, *ARGUMENTS.get(name, [])]
    if name.isdigit():
        env.update(CHANCE=name, TEST_TIMEOUT=str(LIMIT), LSAN_OPTIONS="exitcode=99",
                   ASAN_OPTIONS="exitcode=99")
        command = [BUILD / "chance", "chance."]
    if fault:
        env["FAULT"] = fault
    if counts:
        env["FAULT_COUNT"] = counts
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "examples").symlink_to(ROOT / "examples")
        try:
            done = subprocess.run(command, cwd=folder, env=env, timeout=LIMIT + 10, text=True,
                                  stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, errors="replace")
        except subprocess.TimeoutExpired as late:
            return None, str(late.output)
    return done.returncode, done.stdout


def verdict(name, fault):
    """What is wrong with a program under a fault, or None; and how it went."""
    status, text = attempt(name, fault)
    if status is None:
        return "hangs", text
    if status == 0:
        return None, "finished"
    if name.isdigit() or status < 0 or status == 99 or "Sanitizer" in text:
        return f"status {status}", text
    return (None, "a sentence") if text.strip() else (f"status {status} without a word", text)


def main():
    global BUILD
    parser = argparse.ArgumentParser()
    parser.add_argument("--points", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--flags", default=SANITIZERS)
    parser.add_argument("--build", default="build/faults")
    parser.add_argument("names", nargs="*")
    args = parser.parse_args()
    BUILD = ROOT / args.build
    build([name for name in args.names or EXAMPLES if not name.isdigit()], args.flags)
    dice = random.Random(args.seed)
    names = args.names or EXAMPLES + [str(dice.getrandbits(40)) for _ in range(PROGRAMS)]

    def calls_of(name):
        with tempfile.NamedTemporaryFile() as file:
            status, text = attempt(name, counts=file.name)
            if status != 0:
                print(f"FAIL {name}: status {status} without a fault\n{text}")
            rows = (row.split() for row in open(file.name))
            return name, {of: int(n) for of, n in rows if int(n) > 0}

    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        calls = dict(pool.map(calls_of, names))
        points = []
        for _ in range(args.points):
            name = dice.choice(names)
            if not calls[name]:
                continue
            of = dice.choice(sorted(calls[name]))
            number = min(dice.randint(1, calls[name][of]), int(dice.expovariate(0.05)) + 1)
            points.append((name, f"{of}:{number}:{dice.choice(('once', 'on'))}"))
        went = {}
        failed = 0
        for (name, fault), (wrong, text) in zip(points, pool.map(lambda p: verdict(*p), points)):
            if wrong is None:
                went[text] = went.get(text, 0) + 1
                continue
            failed += 1
            where = f"CHANCE={name} build/faults/chance" if name.isdigit() else name
            print(f"FAIL FAULT={fault} {where}: {wrong}")
            print("\n".join("     " + line for line in text.split("\n")[-30:]), flush=True)
    print(", ".join(f"{count} {how}" for how, count in sorted(went.items())))
    print(f"{len(points) - failed} passed, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
