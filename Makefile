# spdl.h itself needs no building; this builds and runs its tests, examples and benches.
# There is nothing to configure. `make` runs the tests, `make help` lists the targets.
#
#   make test T="ring pool.stop"     only tests with such a part in their name
#   make test ARGS="--repeat 100"    options of the runner: --list --no-fork --slow --jobs N
#                                    --repeat N --seed N --second N --busy (see CONTRIBUTING.md)
#   make CC=clang CFLAGS=-O3         another compiler, other flags; CXX is for the examples
#   make CFLAGS="-O0 -g"             for a debugger
#   make bench JSON=1                one JSON object per line
#   make bench-ring ARGS="--all 4p4c"   options of a bench: --quick --all --list TEXT
#   make V=1                         shows the commands, and each test with what it prints

CFLAGS ?= -Og -g1
ifeq ($(origin CXX),default)
CXX = c++
endif
export CC CXX
MODE =
T = $(SPDL_IN_README)
ARGS =
WERROR = $(if $(SPDL_IN_README),1)
JSON =
FUZZ = $(patsubst tests/fuzz_%.c,%,$(wildcard tests/fuzz_*.c))
FUZZ_TIME = 60
FUZZ_RUNS = 20000
V =
PREFIX = /usr/local
DESTDIR =

# check-readme runs the commands of README.md with SPDL_IN_README set to the few tests it wants, and
# with the objects of check-compilers: all of them have been run before.

# What headers, tests, examples and benches have to pass, under gcc and clang.
WARN = -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wsign-conversion -Wundef -Wcast-qual \
       -Wcast-align -Wvla -Wpointer-arith -Wwrite-strings
WARN_C = $(WARN) -Wstrict-prototypes -Wmissing-prototypes
export WARN WARN_C

# Most of a build with sanitizers is the compiler's optimiser; clang does without it in a fifth of
# the time, and the tests take hardly longer.
QUICK = $(if $(findstring clang,$(CC)),-O0,-Og)
MODE_FLAGS_asan = $(QUICK) -fsanitize=address,undefined -fno-sanitize-recover=all \
    -fno-omit-frame-pointer
MODE_FLAGS_tsan = $(QUICK) -fsanitize=thread
MODE_FLAGS_portable = -DSPDL_OS_POSIX
MODE_FLAGS = $(MODE_FLAGS_$(MODE))

# One folder for each compiler and mode, so that their objects never mix; the file `flags` in it
# changes when the flags do, and everything depends on it.
B = build/$(notdir $(firstword $(CC)))$(MODE:%=-%)
TEST_FLAGS = -std=gnu11 $(WARN_C) $(WERROR:%=-Werror) $(CFLAGS) $(MODE_FLAGS) -pthread
# test-cuda has its own; test_ring.c tests both kinds of waits in every mode. What does not wait, or
# only reads what others have counted, is the same with both. There are no processes: no loader.
SAME = npz% inflate files tokens loader sampler os_none verdict report trace doctor% headspace \
       compare chance
TESTS = $(filter-out tests/test_cuda% \
        $(if $(filter portable,$(MODE)),tests/test_ring% $(SAME:%=tests/test_%.c)),\
        $(wildcard tests/test_*.c)) tests/stress_ring.c
# Tests of pipelines share the library's object; the others have a copy of their own. The table in
# test_ring.c has the tests of test_ring_condvar.c.
SHARES = $(shell grep -lE '^.include "(flow|items|wild_model)\.h"' $(strip $(TESTS)))
TEST_SOURCES = tests/main.c $(if $(SHARES),tests/library.c) $(TESTS) \
               $(if $(filter tests/test_ring.c,$(TESTS)),tests/test_ring_condvar.c)
TEST_OBJECTS = $(TEST_SOURCES:tests/%.c=$(B)/%.o)
BENCHES = $(patsubst bench/bench_%.c,%,$(wildcard bench/bench_*.c))
BENCH_FLAGS = -O2

Q = $(if $(V),,@)
JOBS := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
PARALLEL = $(if $(filter -j%,$(MAKEFLAGS)),,-j$(JOBS)) # unless told otherwise
MAKEFLAGS += --no-print-directory

.PHONY: test
test: ## build and run the tests (the default)
	@$(MAKE) $(PARALLEL) $(B)/runner
	@tests/run.sh $(B)/runner --jobs $(JOBS) $(if $(T)$(V),,--brief) $(ARGS) $(T)

FIRST = demo test examples install bench help
FOR_USERS = uninstall toc flamegraph clean $(BENCHES:%=bench-%) bench-size

.PHONY: help
help: ## list the targets, those for users first
	@awk -F ':.*## ' -v first="$(FIRST)" -v users="$(FOR_USERS)" ' \
	    /^[a-z-]+:.*## / { text[$$1] = sprintf("  %-16s %s", $$1, $$2); name[++n] = $$1 } \
	    function group(names,    part, count, i) { \
	        count = split(names, part, " "); \
	        for (i = 1; i <= count; ++i) { print text[part[i]]; delete text[part[i]] } \
	    } \
	    END { \
	        group(first); \
	        print "more for users:"; \
	        group(users); \
	        print "for authors of spdl.h:"; \
	        for (i = 1; i <= n; ++i) if (name[i] in text) print text[name[i]]; \
	    }' Makefile

VERSION = $(shell awk '/^\#define SPDL_VERSION_(MAJOR|MINOR|PATCH) / { printf "%s%s", dot, $$3; \
          dot = "." }' spdl.h)
TO = $(DESTDIR)$(PREFIX)
INSTALLED = include/spdl.h include/spdl_cuda.h share/doc/spdl/LICENSE share/pkgconfig/spdl.pc \
            share/cmake/spdl/spdlConfig.cmake share/cmake/spdl/spdlConfigVersion.cmake

.PHONY: install
install: ## the headers into PREFIX (/usr/local), for pkg-config and CMake; DESTDIR goes in front
	install -d $(addprefix $(TO)/,$(sort $(dir $(INSTALLED))))
	install -m 644 spdl.h spdl_cuda.h $(TO)/include
	install -m 644 LICENSE $(TO)/share/doc/spdl
	@for name in $(filter %.pc %.cmake,$(INSTALLED)); do \
	    sed -e 's:@PREFIX@:$(PREFIX):' -e 's:@VERSION@:$(VERSION):' \
	        -e 's:@SERIES@:$(basename $(VERSION)):' \
	        examples/packages/installed/$${name##*/}.in >$(TO)/$$name && \
	        chmod 644 $(TO)/$$name || exit 1; \
	done

.PHONY: uninstall
uninstall: ## removes what `make install` put there, with the same PREFIX and DESTDIR
	rm -f $(addprefix $(TO)/,$(INSTALLED))
	-@rmdir $(TO)/share/cmake/spdl $(TO)/share/doc/spdl 2>/dev/null || true

.PHONY: demo
demo: build/demo/train_digits ## train a small network on real data, with statistics
	@build/demo/train_digits

.PHONY: examples
examples: ## build every example by its own build line, and run it
	@tests/check_examples.sh

.PHONY: flamegraph
flamegraph: ## where the time of an example goes, by stage: perf, and a drawing (needs perf)
	@tests/check_perf.sh build/flamegraph

.PHONY: bench
bench: ## run all benches but bench-doctor, one after the other
	@for name in $(filter-out doctor,$(BENCHES)); do $(MAKE) bench-$$name || exit 1; done

.PHONY: bench-ring
bench-ring: ## the queues

.PHONY: bench-npz
bench-npz: ## reading arrays, against libdeflate, ISA-L, zlib, NumPy and SPDL

.PHONY: bench-pipeline
bench-pipeline: ## the engine, against oneTBB, GLib, OpenMP, threads by hand, SPDL and PyTorch

.PHONY: bench-peers
bench-peers: ## beside PyTorch, SPDL, Grain, oneTBB, OpenMP, threads, curl (first time: 5 GB)

.PHONY: bench-sampler
bench-sampler: ## what an index costs, against Grain and SPDL

.PHONY: bench-loader
bench-loader: ## the loader process, against a futex, SPDL, PyTorch, Grain (first time: 5 GB)

.PHONY: bench-frames
bench-frames: ## a game at 60 Hz while it loads: frames that come too late

.PHONY: bench-neighbour
bench-neighbour: ## a trainer beside loaders: threads or a process, polite or not

.PHONY: bench-trace
bench-trace: ## what traces cost, on and off

.PHONY: bench-stats
bench-stats: ## what statistics and reports cost

.PHONY: bench-state
bench-state: ## what it costs to save and load a position

.PHONY: bench-doctor
bench-doctor: ## whether the doctor is right, on programs with a planted limit (about 20 min)

.PHONY: bench-size
bench-size: ## what including the header costs: time to compile, code (BASE=FILE: beside another)
	@bench/size.sh $(BASE)

.PHONY: bench-cuda
bench-cuda: ## copies to a GPU; without one on a stand-in, for show

.PHONY: asan
asan: ## the tests under AddressSanitizer, LeakSanitizer and UndefinedBehaviorSanitizer
	@$(MAKE) test MODE=asan

.PHONY: tsan
tsan: ## the tests under ThreadSanitizer
	@$(MAKE) test MODE=tsan

.PHONY: portable
portable: ## the tests on the waits and barriers of other systems
	@$(MAKE) test MODE=portable T="$(or $(T),$(filter-out cuda% ring% $(SAME),\
	    $(patsubst tests/test_%.c,%,$(wildcard tests/test_*.c))) stress)"

.PHONY: stress
stress: ## the rings under stress at length: 1e9 items through SPSC rings, 1e8 through MPMC
	@$(MAKE) $(PARALLEL) $(B)/runner
	@STRESS=long TEST_TIMEOUT=0 tests/run.sh $(B)/runner --jobs $(JOBS) $(ARGS) stress.

EXPLORERS = $(addprefix build/explore/,fast plain futex condvar)
.PHONY: model
model: ## models of who sleeps and wakes (needs spin); rings, pipelines under a model of memory
	@$(MAKE) $(EXPLORERS)
	@RUNS=$(RUNS) tests/model/run.sh $(addprefix --explorer $(CURDIR)/,$(EXPLORERS)) $(MODEL_ARGS)

.PHONY: explore
explore: ## rings, pipelines under a model of memory, SECONDS (2) a scenario: ten minutes
	@$(MAKE) $(EXPLORERS)
	@bad=0; for program in $(EXPLORERS); do \
	    $$program --seconds $(or $(SECONDS),2) || bad=1; done; exit $$bad

.PHONY: mutate
mutate: ## would the tests notice a changed line? 300 by chance (ARGS="--count N --seed N"; an hour)
	@python3 tests/mutate.py $(ARGS)

.PHONY: mutate-ring
mutate-ring: ## would we notice a memory order, barrier or wake that is missing? (minutes)
	@tests/mutate_ring.sh

.PHONY: mutate-engine
mutate-engine: ## would the explorer notice a weaker order in a pipeline? (ARGS=WORD; 20 minutes)
	@$(MAKE) build/explore/futex
	@tests/model/mutate_engine.py $(ARGS) build/explore/futex

# One after the other; what fails ends it. CHANCE_ROUNDS, SECONDS and FUZZ_RUNS set the lengths.
.PHONY: torture
torture: ## the long forms of what `make check` does briefly: hours
	@$(MAKE) check-compilers CFLAGS="-O2 -g1"
	@$(MAKE) asan CC=gcc
	@$(MAKE) tsan CC=gcc
	@$(MAKE) stress
	@CHANCE_ROUNDS=$(or $(CHANCE_ROUNDS),200000) TEST_TIMEOUT=0 \
	    tests/run.sh $(B)/runner chance. # built by `stress`
	@STATE_POINTS=1000 TEST_TIMEOUT=0 tests/run.sh $(B)/runner state.random
	@$(MAKE) model MODEL_ARGS=--long
	@$(MAKE) explore SECONDS=$(or $(SECONDS),20)
	@$(MAKE) check-fuzz FUZZ_RUNS=$(if $(filter file,$(origin FUZZ_RUNS)),1000000,$(FUZZ_RUNS))
	@$(MAKE) torture-loader
	@$(MAKE) torture-faults
	@$(MAKE) test-cuda
	@$(MAKE) mutate-ring
	@$(MAKE) mutate-engine

.PHONY: selftest
selftest: ## does the test runner report what goes wrong?
	@$(MAKE) $(B)/selftest
	@tests/selftest/run.sh $(B)/selftest

.PHONY: fuzz
fuzz: ## hostile files and streams, FUZZ_TIME seconds (60) for each target; needs clang
	@for name in $(FUZZ); do $(MAKE) fuzz-$$name || exit 1; done

.PHONY: check-fuzz
check-fuzz: ## the same for FUZZ_RUNS inputs (20000), always the same ones; any compiler
	@$(MAKE) $(PARALLEL) $(FUZZ:%=build/fuzz/driver_%)
	@tests/check_fuzz.sh $(FUZZ_RUNS) $(FUZZ)

POINTS = 1000
.PHONY: torture-loader
torture-loader: build/torture_loader ## ends processes of a loader, at POINTS (1000) of each kind
	@build/torture_loader $(POINTS)

.PHONY: torture-faults
torture-faults: ## memory, threads, files, maps, futexes that fail, at FAULTS points (2000)
	@python3 tests/torture_faults.py --points $(or $(FAULTS),2000) $(ARGS)

.PHONY: check-bigendian
check-bigendian: ## the npz tests on s390x (needs gcc-s390x-linux-gnu and qemu-user)
	@tests/check_bigendian.sh

.PHONY: coverage
coverage: ## branches of the headers that no test takes (needs clang, llvm, python3; ARGS: sections)
	@tests/coverage.sh $(ARGS)

.PHONY: check
check: ## everything that CI runs, and the sum of it
	@if [ -n "$$SPDL_IN_README" ]; then $(MAKE) test; else tests/check.sh; fi

.PHONY: check-compilers
check-compilers: ## the tests under gcc and clang, warnings being errors
	@$(MAKE) test CC=gcc WERROR=1
	@$(MAKE) test CC=clang WERROR=1

.PHONY: check-warnings
check-warnings: ## C99 to C17, C++11 to C++20, gcc and clang, every mode of the headers
	@tests/check_warnings.sh

.PHONY: check-headers
check-headers: ## includes, macros, symbols, linking, licence and version
	@tests/check_headers.sh

.PHONY: check-hygiene
check-hygiene: ## the headers after Qt, windows.h, X11 and unix headers; unity builds, LTO
	@tests/check_hygiene.sh

.PHONY: check-howto
check-howto: ## the answers of examples/HOWTO.md
	@tests/check_howto.sh

.PHONY: check-budget
check-budget: ## instructions of a push, a pop and a row (needs valgrind); atomic writes of an item
	@tests/check_budget.sh

.PHONY: check-core-alone
check-core-alone: ## the lock-free part of the rings compiles without the rest
	@tests/check_core_alone.sh

.PHONY: cross
cross: ## the tests on other processors (needs cross compilers and qemu-user)
	@tests/check_cross.sh

.PHONY: matrix
matrix: ## systems, processors, compilers: a line for each, tests run, linked or compiled
	@tests/matrix.sh

.PHONY: matrix-long
matrix-long: ## the same, and cells that repeat another
	@tests/matrix.sh --long

.PHONY: check-perf
check-perf: ## perf shows threads and stages by their names (skips where there is no perf)
	@tests/check_perf.sh

.PHONY: check-docs
check-docs: ## what is said above every public function
	@tests/check_docs.sh

.PHONY: check-words
check-words: ## plain English in the declarations, the messages and the pages for users
	@tests/check_words.sh

.PHONY: check-surface
check-surface: ## how many functions, macros, fields, lines and words are public
	@tests/check_surface.sh

.PHONY: check-messages
check-messages: ## examples/MESSAGES.md has every message of spdl.h
	@tests/check_messages.sh

.PHONY: check-readme
check-readme: ## the commands, the program and the links of README.md
	@tests/check_readme.sh

.PHONY: check-packages
check-packages: ## make install, and examples/packages with each tool that is there
	@tests/check_packages.sh

.PHONY: check-numpy
check-numpy: ## NumPy reads what examples/npz_writer.h writes (NumPy from PyPI, if there is none)
	@tests/check_numpy.sh

.PHONY: check-bindings
check-bindings: ## tools that make bindings read the header (cffi from PyPI)
	@tests/check_bindings.sh

.PHONY: check-pages
check-pages: ## programs that were written from the pages for users alone
	@tests/check_pages.sh

.PHONY: check-report
check-report: ## the page of the reports in a browser (needs chromium)
	@tests/check_report.sh

.PHONY: test-cuda
test-cuda: ## spdl_cuda.h with the CUDA toolkit, and on a stand-in for the runtime (no GPU needed)
	@CUDA_ARGS="$(ARGS) $(T)" tests/check_cuda.sh

.PHONY: lint
lint: ## tabs, trailing space, lines over 100 columns, final newlines
	@tests/check_lint.sh

.PHONY: toc
toc: ## the sections of the headers, with their lines
	@awk 'FNR == 1 { if (n % 4) print ""; print FILENAME; n = 0 } \
	    /^\/\* >>/ { printf "%7d %-17s%s", FNR, substr($$2, 3), ++n % 4 ? "" : "\n" } \
	    END { if (n % 4) print "" }' $(wildcard spdl*.h)

.PHONY: clean
clean: ## remove build/
	rm -rf build

# Rules ------------------------------------------------------------------------------------------

.PHONY: FORCE
FORCE:

$(B)/flags: FORCE
	@mkdir -p $(B)
	@echo '$(CC) $(TEST_FLAGS)' | cmp -s - $@ || echo '$(CC) $(TEST_FLAGS)' >$@

$(B)/%.o: tests/%.c $(B)/flags
	$(if $(V),,@echo "  $(CC) $<")
	$(Q)$(CC) $(TEST_FLAGS) -MMD -MP -c -o $@ $<

$(B)/runner: $(TEST_OBJECTS)
	$(Q)$(CC) $(CFLAGS) $(MODE_FLAGS) -o $@ $^ $(LDFLAGS) -lpthread -lm

$(B)/selftest: tests/selftest/selftest.c tests/test.h tests/test_memory.h $(B)/flags
	$(Q)$(CC) $(TEST_FLAGS) -o $@ $< $(LDFLAGS) -lpthread

# The explorer: the header sees neither ThreadSanitizer nor, in `plain`, the membarrier.
EXPLORE_FLAGS = -g -O1 -std=gnu11 $(WARN_C) -Wno-tsan -fsanitize=thread -U__SANITIZE_THREAD__
build/explore/fast: EXPLORED = ring
build/explore/plain: EXPLORED = ring -DSPDL__OS_BARRIER=0
build/explore/futex: EXPLORED = pipeline
build/explore/condvar: EXPLORED = pipeline -DSPDL_OS_POSIX
$(EXPLORERS): tests/model/explore.c tests/model/explore.h tests/model/explore_ring.c \
        tests/model/explore_pipeline.c spdl.h
	@mkdir -p $(@D)
	$(Q)gcc -g -O2 -std=gnu11 $(WARN_C) -c tests/model/explore.c -o $@-run.o
	$(Q)gcc $(EXPLORE_FLAGS) $(wordlist 2,9,$(EXPLORED)) -o $@.o \
	    -c tests/model/explore_$(firstword $(EXPLORED)).c
	$(Q)gcc -o $@ $@-run.o $@.o -lpthread

build/torture_loader: tests/torture_loader.c tests/loader.h spdl.h
	@mkdir -p $(@D)
	$(Q)$(CC) -std=gnu11 $(WARN_C) -Og -g -Itests $< -o $@ -lpthread

build/demo/%: examples/%.c $(wildcard examples/*.h) spdl.h
	@mkdir -p $(@D)
	$(CC) -O2 -I. $< -o $@ -lpthread -lm

build/bench/%: bench/%.c $(wildcard bench/*.h) spdl.h
	@mkdir -p $(@D)
	$(Q)$(CC) $(BENCH_FLAGS) -DBENCH_FLAGS='"$(BENCH_FLAGS)"' -I. $< -o $@ \
	    -lpthread -lm -ldl $(BENCH_LIBS)

# From two objects: the second is without the hooks.
build/bench/bench_trace: bench/bench_trace.c bench/bench.h spdl.h
	@mkdir -p $(@D)
	$(Q)$(CC) $(BENCH_FLAGS) -DSPDL__NO_TRACE -c $< -o $@-plain.o
	$(Q)$(CC) $(BENCH_FLAGS) -DBENCH_FLAGS='"$(BENCH_FLAGS)"' $< $@-plain.o -o $@ -lpthread -lm

# Twice the same file, with statistics and without.
build/bench/bench_stats: bench/bench_stats.c bench/bench.h spdl.h
	@mkdir -p $(@D)
	$(Q)$(CC) $(BENCH_FLAGS) -I. -DSPDL__NO_STATS=1 -c $< -o build/bench/no_stats.o
	$(Q)$(CC) $(BENCH_FLAGS) -DBENCH_FLAGS='"$(BENCH_FLAGS)"' -I. $< build/bench/no_stats.o -o $@ \
	    -lpthread -lm

# A peer that cannot be built leaves no file, and is tried again the next time.
PEER = @mkdir -p $(@D); BENCH_FLAGS='$(BENCH_FLAGS)' bench/peers/build.sh $< $@
PEER_NEEDS = $(wildcard bench/*.h bench/peers/*.hpp bench/peers/*.sh)
build/bench/peers/%.so: bench/peers/%.cpp $(PEER_NEEDS)
	$(PEER)
build/bench/peers/%.so: bench/peers/%.c $(PEER_NEEDS)
	$(PEER)
build/bench/peers/%: bench/peers/%.go $(PEER_NEEDS)
	$(PEER)
build/bench/peers/%: bench/peers/%.rs $(PEER_NEEDS)
	$(PEER)

PEERS = $(patsubst %.c,%.so,$(patsubst %.cpp,%.so,$(wildcard bench/peers/*.c bench/peers/*.cpp))) \
        $(basename $(wildcard bench/peers/*.go bench/peers/*.rs))
PIPE_PEERS = $(filter bench/peers/pipe_%,$(PEERS))
bench-ring: $(patsubst %,build/%,$(filter-out $(PIPE_PEERS),$(PEERS)))

# On a device where there is one with a toolkit, else on the stand-in for the CUDA runtime.
CUDA_HOME ?= /usr/local/cuda
GPU = $(and $(wildcard $(CUDA_HOME)/bin/nvcc),$(wildcard /dev/nvidia[0-9]*))
CUDA_ARCH ?= native
CUDA_LIBRARY = $(firstword $(wildcard $(CUDA_HOME)/lib64 $(CUDA_HOME)/lib))
CUDA_BENCH_FILES = bench/bench_cuda.c bench/bench.h spdl.h spdl_cuda.h \
                   $(wildcard tests/cuda_kit* tests/cudart_sim.* tests/cudart_min/*)

build/bench/bench_cuda: $(CUDA_BENCH_FILES)
	@mkdir -p $(@D)
ifneq ($(GPU),)
	$(Q)$(CUDA_HOME)/bin/nvcc -O2 -arch=$(CUDA_ARCH) -Itests -c tests/cuda_kit.cu \
	    -o build/bench/cuda_kit.o
	$(Q)$(CC) $(BENCH_FLAGS) -DBENCH_FLAGS='"$(BENCH_FLAGS)"' -isystem $(CUDA_HOME)/include $< \
	    build/bench/cuda_kit.o -o $@ -L$(CUDA_LIBRARY) -lcudart_static -lstdc++ -ldl -lrt \
	    -lpthread -lm
else
	$(Q)$(CC) $(BENCH_FLAGS) -Itests/cudart_min -fPIC -shared tests/cudart_sim.c \
	    -o $(@D)/libcudart_sim.so
	$(Q)$(CC) $(BENCH_FLAGS) -DBENCH_FLAGS='"$(BENCH_FLAGS)"' -DBENCH_SIMULATED \
	    -Itests/cudart_min $< tests/cuda_kit_sim.c -o $@ -L$(@D) -lcudart_sim \
	    -Wl,-rpath,$(abspath $(@D)) -ldl -lpthread -lm
endif

$(filter-out bench-npz bench-pipeline bench-sampler bench-loader bench-peers,\
    $(BENCHES:%=bench-%)): bench-%: \
    build/bench/bench_%
	@$< $(JSON:%=--json) $(ARGS)

bench-pipeline: build/bench/bench_pipeline $(PIPE_PEERS:%=build/%)
	@BENCH_PIPELINE_PYTHON=$$(bench/npz_python.sh) $< $(JSON:%=--json) $(ARGS)

build/bench/loader_work.so: bench/loader_work.c bench/loader_work.h
	@mkdir -p $(@D)
	$(Q)$(CC) $(BENCH_FLAGS) -shared -fPIC $< -o $@

bench-loader: build/bench/bench_loader build/bench/loader_work.so
	@BENCH_LOADER_PYTHON=$$(bench/loader_python.sh) $< $(JSON:%=--json) $(ARGS)

# The work of all sides: one shared object, also for those in Python.
WORK = bench/peer_work.c $(if $(call has_header,jpeglib.h),bench/peers/pipe_jpeg.c)
build/bench/peer_work.so: $(wildcard bench/*.h) bench/peer_work.c bench/peers/pipe_jpeg.c
	@mkdir -p $(@D)
	$(Q)$(CC) $(BENCH_FLAGS) -shared -fPIC $(WORK) -o $@ \
	    $(call libraries,jpeglib.h:jpeg zlib.h:z curl/curl.h:curl) -lpthread -lm

build/bench/bench_peers: build/bench/peer_work.so
build/bench/bench_peers: BENCH_LIBS = build/bench/peer_work.so -Wl,-rpath,'$$ORIGIN' \
    $(call libraries,curl/curl.h:curl)

PEERS_SIDES = $(addprefix build/bench/peers/pipe_,tbb.so omp.so async.so)
bench-peers: build/bench/bench_peers build/bench/bench_frames $(PEERS_SIDES)
	@BENCH_PEERS_PYTHON=$$(bench/loader_python.sh) $< $(JSON:%=--json) $(ARGS)
	@build/bench/bench_frames $(JSON:%=--json) \
	    $(filter -%,$(ARGS)) $(or $(filter-out -%,$(ARGS)),missed_default)

# -lLIBRARY for each HEADER:LIBRARY whose header is there.
has_header = $(shell printf '\043include <%s>\n' $(1) | $(CC) -E -x c - >/dev/null 2>&1 && echo yes)
libraries = $(foreach pair,$(1),$(if $(call has_header,$(firstword $(subst :, ,$(pair)))),\
            -l$(lastword $(subst :, ,$(pair)))))
build/bench/bench_npz: BENCH_LIBS = $(call libraries,libdeflate.h:deflate isa-l.h:isal zlib.h:z)

build/bench/npz/made: bench/make_npz_data.py
	@mkdir -p $(@D)
	@python=$$(bench/npz_python.sh) && $$python $< $(@D) && touch $@

bench-sampler: build/bench/bench_sampler
	@BENCH_SAMPLER_PYTHON=$$(bench/sampler_python.sh) $< $(JSON:%=--json) $(ARGS)

bench-npz: build/bench/bench_npz build/bench/npz/made
	@BENCH_NPZ_PYTHON=$$(bench/npz_python.sh) $< $(JSON:%=--json) $(ARGS)

FUZZ_FLAGS = -g1 -fsanitize=address,undefined -fno-sanitize-recover=all -pthread

build/fuzz/driver_%: tests/fuzz_%.c tests/fuzz.h spdl.h
	@mkdir -p $(@D)
	$(Q)$(CC) $(QUICK) $(FUZZ_FLAGS) -DFUZZ_DRIVER $< -o $@ $(call libraries,zlib.h:z)

build/fuzz/fuzz_%: tests/fuzz_%.c tests/fuzz.h spdl.h
	@mkdir -p $(@D)
	$(Q)clang -O1 $(FUZZ_FLAGS) -fsanitize=fuzzer $< -o $@ $(call libraries,zlib.h:z)

$(FUZZ:%=fuzz-%): fuzz-%: build/fuzz/fuzz_%
	@mkdir -p build/fuzz/$*
	@$< -max_total_time=$(FUZZ_TIME) -artifact_prefix=build/fuzz/ -print_final_stats=1 -max_len=16384 \
	    build/fuzz/$* tests/corpus/$* $(if $(filter npz,$*),tests/data)

-include $(TEST_OBJECTS:.o=.d)
