"""Would the tests notice a changed line? Changes one line of spdl.h at a time, drawn by chance:
operators, constants, statements that go, memory orders that become relaxed. Each change meets the
tests of its section's modules, in seconds; with ThreadSanitizer if it is a memory order, with
AddressSanitizer where something is freed. Those that no test noticed are listed; a reason for each
that was found before is in tests/mutants.md.

    python3 tests/mutate.py [--count 300] [--seed 1] [--jobs 2] [--list] [TEXT ...]

TEXT: only changes with such a text in their line of the output. `make mutate` builds nothing else.
One change after the other, with JOBS compilers and tests at a time: tests that read clocks are
skipped on a machine with other load.
"""

import argparse
import concurrent.futures
import hashlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "mutate"
KNOWN = ROOT / "tests" / "mutants.md"

# The modules whose tests a change of a section meets, the quick ones first.
FLOW = "pipeline flow again defer fail lifetime mutants source debug chance"
MODULES = {
    "platform-impl": "core alloc ring",
    "atomics-impl": "core ring pool",
    "os": "core alloc files pool",
    "os-posix": "core alloc files npz_file pool stats",
    "os-linux": "core pool push stats",
    "os-process": "loader",
    "core-impl": "core alloc mistakes",
    "text-impl": "stats state report files npz",
    "ring-core": "ring",
    "ring-impl": "ring alloc",
    "pool-impl": "pool guests lifetime mutants",
    "meter-impl": "trace stats",
    "trace-core": "trace",
    "edge-impl": FLOW + " stats",
    "row-impl": "pipeline branch " + FLOW,
    "position-impl": "state rewind mutants",
    "flow-impl": FLOW + " stats next ready push",
    "wake-impl": "pipeline branch " + FLOW,
    "blame-impl": FLOW + " stats",
    "mark-impl": FLOW + " stats",
    "fail-impl": FLOW + " stats",
    "debug-impl": FLOW + " stats",
    "call-impl": FLOW + " stats",
    "again-impl": FLOW + " stats",
    "defer-impl": FLOW + " stats",
    "settle-impl": FLOW + " stats",
    "batch-impl": "batch rows fail mutants chance",
    "merge-impl": "branch mutants chance",
    "producer-impl": "source next " + FLOW,
    "next-impl": "next ready state push lifetime pipeline mutants mistakes stats chance",
    "stop-impl": "lifetime rewind source mutants chance",
    "create-impl": "pipeline rows mistakes lifetime batch branch push alloc trace",
    "stats-impl": "stats next verdict report",
    "report-impl": "report",
    "cache-impl": "cache",
    "compare-impl": "compare headspace",
    "headspace-impl": "headspace compare",
    "probe-impl": "doctor",
    "doctor-impl": "doctor doctor_text",
    "doctor-text-impl": "doctor_text",
    "sampler-impl": "sampler state",
    "loader-impl": "loader",
    "crc-impl": "inflate npz",
    "inflate-impl": "inflate npz",
    "zip-impl": "npz npz_file npz_cover",
    "npy-impl": "npz npz_file",
    "npz-impl": "npz npz_file npz_cover",
    "load-impl": "npz_file npz_cover",
    "files-impl": "files",
    "state-impl": "state sampler mutants",
    "trace-impl": "trace",
}
OBJECTS = {"npz_in_pieces": "test_npz_pieces", "stress": "stress_ring"}

OPERATORS = [
    (r" == ", " != "), (r" != ", " == "), (r" < ", " <= "), (r" <= ", " < "), (r" > ", " >= "),
    (r" >= ", " > "), (r" && ", " || "), (r" \|\| ", " && "), (r" \+ ", " - "), (r" - ", " + "),
    (r"(?<![\w)])!(?=[\w(])", ""), (r"\btrue\b", "false"), (r"\bfalse\b", "true"),
    (r"(\+\+)(?=\w)", "--"), (r" \+= ", " -= "), (r" -= ", " += "), (r" << ", " >> "),
]
# Not the sizes of arrays.
CONSTANTS = [(r"(?<![\w.])0(?![\w.])", "1"), (r"(?<![\w.])1(?![\w.])", "0"),
             (r"(?<![\w.\[])([2-9]|[1-9]\d{1,4})(?![\w.])", None)]
ORDERS = [(r"\bspdl__load(32)?\(", r"spdl__load_relaxed\1("),
          (r"\bspdl__store(32)?\(", r"spdl__store_relaxed\1(")]
STATEMENT = re.compile(r"^( {4,})((?:\(void\))?(?:\+\+|--)?[a-z_]\w*(?:(?:->|\.)\w+|\[[^\]]*\])*"
                       r"(?:\(.*\)| (?:[-+|&]?=) .*|\+\+|--)?;)( /\*.*\*/)?$")


class Mutant:
    """A change of one line."""

    def __init__(self, at, section, function, kind, before, after):
        self.at, self.section, self.function, self.kind = at, section, function, kind
        self.before, self.after = before, after

    def text(self):
        """What it is, without the number of its line, which changes from day to day."""
        shorten = lambda line: re.sub(r"\s+", " ", line.strip())
        return f"{self.section} {self.function}: {shorten(self.before)} -> {shorten(self.after)}"


def masked(line, inside):
    """The line with what is no code blanked; whether a comment goes on after it."""
    out, i = [], 0
    while i < len(line):
        if inside:
            end = line.find("*/", i)
            stop = len(line) if end < 0 else end + 2
            out.append(" " * (stop - i))
            inside, i = end < 0, stop
        elif line.startswith("/*", i):
            inside = True
        elif line[i] in "\"'":
            end = i + 1
            while end < len(line) and line[end] != line[i]:
                end += 2 if line[end] == "\\" else 1
            out.append("\x00" * (min(end, len(line) - 1) + 1 - i))
            i = end + 1
        else:
            out.append(line[i])
            i += 1
    return "".join(out), inside


def changes(line, code):
    """All changes of a line, as (kind, line)."""
    found = STATEMENT.match(line)
    if found and not re.match(r"(return|break|continue|goto|case|default)\b", found.group(2)):
        yield "statement", found.group(1) + ";"
    for kind, rules in ("operator", OPERATORS), ("constant", CONSTANTS), ("order", ORDERS):
        for pattern, to in rules:
            for hit in re.finditer(pattern, code):
                new = str(int(hit.group()) + 1) if to is None else hit.expand(to)
                yield kind, line[: hit.start()] + new + line[hit.end() :]


def candidates(lines):
    """Lines of code of the implementation with their changes."""
    section, function, inside, macro, on = None, "", False, False, False
    for at, line in enumerate(lines):
        tag = re.match(r"/\* >>([a-z0-9-]+)", line)
        if tag:
            section, on = tag.group(1), tag.group(1) in MODULES
        code, inside = masked(line, inside)
        if line.startswith("#") or macro:
            macro = line.endswith("\\")
            continue
        name = re.match(r"SPDL_\w+ .*?(spdl_\w+)\(", line)
        if name:
            function = name.group(1)
        if not on or not line.startswith("    ") or "assert" in code or "TEST_POINT" in code:
            continue
        found = list(changes(line, code))
        if found:
            yield at, section, function, line, found


def draw(lines, count, seed):
    """`count` mutants: a line by chance, and one of its changes. A line keeps its number in the
    draw when others change: most mutants of a seed stay the same from day to day."""
    met, every = {}, []
    for at, section, function, line, found in candidates(lines):
        text = f"{seed} {section} {function} {line.strip()}"
        met[text] = met.get(text, 0) + 1
        digest = hashlib.sha256(f"{text} {met[text]}".encode()).digest()
        every.append((digest, at, section, function, line, found))
    for digest, at, section, function, line, found in sorted(every)[:count]:
        kind, new = found[digest[-1] % len(found)]
        yield Mutant(at, section, function, kind, line, new)


# --- a copy of the tests in which one mutant is built at a time ---


class Copy:
    """A folder with the tests and a header that changes."""

    def __init__(self, jobs):
        self.path, self.jobs = WORK / "copy", jobs
        shutil.rmtree(self.path, ignore_errors=True)
        shutil.copytree(ROOT / "tests", self.path / "tests",
                        ignore=shutil.ignore_patterns("corpus", "model"))
        for name in "spdl.h", "spdl_cuda.h":
            shutil.copy(ROOT / name, self.path / name)
        (self.path / "bench").symlink_to(ROOT / "bench")
        (self.path / "examples").symlink_to(ROOT / "examples")

    def whole(self, module):
        """Whether the tests of a module have a copy of the implementation of their own."""
        text = (ROOT / "tests" / f"{OBJECTS.get(module, f'test_{module}')}.c").read_text()
        shared = re.search(r'include "(flow|items|wild_model)\.h"', text)
        return not shared or "ITEMS_PRIVATE" in text

    def groups(self, modules):
        """Those that share one copy first: most changes need no other."""
        every = list(dict.fromkeys(modules.split()))
        groups = [m for m in every if not self.whole(m)], [m for m in every if self.whole(m)]
        return [group for group in groups if group]

    def build(self, modules, sanitizer):
        """The runner of these modules; None: it does not compile. A main program, the library that
        some share, and the tests."""
        out = self.path / (sanitizer or "plain")
        out.mkdir(exist_ok=True)
        flags = ["-std=gnu11", "-O0", "-w", "-pthread"]
        flags += [f"-fsanitize={sanitizer}"] if sanitizer else []
        parts = [("main", False), ("library", True)]
        parts += [(OBJECTS.get(m, f"test_{m}"), self.whole(m)) for m in modules]
        parts += [("test_ring_condvar", True)] if "ring" in modules else []

        def compiled(part):
            name, whole = part
            to = out / f"{name}.o"
            return to.exists() and not whole or subprocess.run(
                ["clang", *flags, "-c", f"tests/{name}.c", "-o", to], cwd=self.path,
                capture_output=True).returncode == 0

        with concurrent.futures.ThreadPoolExecutor(self.jobs) as pool:
            if not all(pool.map(compiled, parts)):
                return None
        runner = out / "runner"
        made = [out / f"{name}.o" for name, _ in parts]
        done = subprocess.run(["clang", *flags, *made, "-o", runner, "-lm"], cwd=self.path,
                              capture_output=True)
        return runner if done.returncode == 0 else None

    def fails(self, runner, filters, jobs):
        """The first test that fails, or None; and those that read clocks and were skipped."""
        rounds = "300" if "plain" in str(runner) else "40"
        env = dict(os.environ, TEST_TIMEOUT="30", CHANCE_ROUNDS=rounds)
        command = ["tests/run.sh", runner, "--jobs", str(jobs), *filters]
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE,
                                   stderr=subprocess.DEVNULL, start_new_session=True, text=True,
                                   errors="replace")
        name, clocks = None, []
        for line in process.stdout:
            if line.startswith("FAIL "):
                name = line.split()[1].rstrip(":")
                break
            if line.startswith("skip ") and "reads clocks" in line:
                clocks.append(line.split()[1].rstrip(":"))
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
        return name, clocks

    def test(self, mutant, lines):
        """What became of it: "killed by TEST", "survived" or "does not compile"."""
        changed = list(lines)
        changed[mutant.at] = mutant.after
        (self.path / "spdl.h").write_text("\n".join(changed))
        sanitizer = None
        if mutant.kind == "order":
            sanitizer = "thread"
        elif "free" in mutant.before:  # AddressSanitizer sees what leaks
            sanitizer = "address"
        for modules in self.groups(MODULES[mutant.section]):
            runner = self.build(modules, sanitizer)
            if runner is None:
                return "does not compile"
            name = self.noticed(runner, [f"{module}." for module in modules])
            if name is not None:
                return f"killed by {name}"
        return "survived"

    def noticed(self, runner, filters):
        """A test that fails, and does so again; or None. Many tests sleep: several at a time. Those
        that read clocks are skipped then, and run after the others."""
        for _ in range(2):
            name, clocks = self.fails(runner, filters, 4 * self.jobs)
            if name is None and clocks:
                name, _ = self.fails(runner, clocks, self.jobs)
            if name is None or self.fails(runner, [name], 1)[0]:
                return name
        return None


def reasons():
    """The survivors that are known: {text: reason}."""
    out = {}
    for line in KNOWN.read_text().split("\n") if KNOWN.exists() else []:
        row = re.match(r"\| `(.*)` \| (.*) \|$", line)
        if row:
            out[row.group(1).replace("\\|", "|")] = row.group(2)
    return out


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--list", action="store_true")
    parser.add_argument("words", nargs="*")
    args = parser.parse_args()
    lines = (ROOT / "spdl.h").read_text().split("\n")
    mutants = [m for m in draw(lines, args.count, args.seed)
               if not args.words or any(word in m.text() for word in args.words)]
    if args.list:
        for m in mutants:
            print(f"{m.at + 1:6} {m.kind:9} {m.text()}")
        return 0
    known, count = reasons(), {"killed": 0, "survived": 0, "known": 0}
    copy = Copy(args.jobs)
    for mutant in mutants:
        became = copy.test(mutant, lines)
        word = became.split()[0]
        if became == "survived" and mutant.text() in known:
            word, became = "known", "known: " + known[mutant.text()]
        count[word] = count.get(word, 0) + 1
        print(f"{became:40} {mutant.at + 1:6} {mutant.text()}", flush=True)
    met = count["killed"] + count["survived"] + count["known"]
    share = count["killed"] / max(1, met)
    print(f"{count['killed']} of {met} changes were noticed ({share:.0%}), "
          f"{count['known']} known, {count['survived']} not")
    bad = share < 0.85 and not args.words
    print(f"{met - count['survived']} passed, {count['survived'] or int(bad)} failed")
    return count["survived"] > 0 or bad


if __name__ == "__main__":
    sys.exit(main())
