#!/bin/sh
# What the headers bring into a program besides what they promise: includes, macros, symbols. And
# that their parts fit together: C with C++, licence, version, tags. With BRIEF=1, as in
# `make check`, each program is built by one compiler and in one standard.
. "$(dirname "$0")/tally.sh"
compilers="gcc:c:c11 clang:c:c17 g++:c++:c++17 clang++:c++:c++20"
headers="spdl.h spdl_cuda.h"
declare_all='#include "spdl.h"
#include "spdl_cuda.h"'
implement='#define SPDL_IMPLEMENTATION
#include "spdl.h"'

# compile SOURCE OPTION ...: with the compiler of this round; fixed addresses, so that a constant
# table of pointers counts as constant
compile() {
    echo "$1" >"$scratch/source"
    shift
    $cc -x "$language" -std="$std" -I. -fno-pie "$@" "$scratch/source"
}

# names of the macros that are defined after SOURCE
macros() {
    compile "$1" -dM -E | awk '{ sub(/\(.*/, "", $2); print $2 }' | sort -u
}

# strangers WHAT SOURCE PLAIN: macros of SOURCE that PLAIN has not, and that lack our prefix
strangers() {
    macros "$3" >"$scratch/plain"
    macros "$2" | comm -13 "$scratch/plain" - | grep -vE '^(SPDL_|spdl_)' >"$scratch/strangers"
    empty "$what: $1 defines macros without the prefix" "$scratch/strangers"
}

# symbols SOURCE NM-OPTION ...
symbols() {
    source=$1
    shift
    compile "$source" -c -o "$scratch/object.o" && nm "$@" "$scratch/object.o" |
        grep -v ' _\.stapsdt\.base$' # of <sys/sdt.h>, where there is one
}

# The includes of the implementation, without those of the declarations.
system_headers=$(grep -h '^#include <' spdl.h | sort -u)
# Some are optional or of other systems.
for header in sys/sdt.h pthread/qos.h intrin.h io.h windows.h psapi.h; do
    echo "#include <$header>" | gcc -E -x c - >/dev/null 2>&1 ||
        system_headers=$(echo "$system_headers" | grep -vF "<$header>")
done

for compiler in $compilers; do
    IFS=: read -r cc language std <<EOF
$compiler
EOF
    what="$cc -std=$std"

    # Declarations: three headers, no symbol, nothing but our names.
    compile "$declare_all" -H -fsyntax-only 2>&1 | sed -n 's/^\.\. .*\///p' | sort -u |
        grep -vxE 'stdbool\.h|stddef\.h|stdint\.h' >"$scratch/includes"
    empty "$what: the declarations include more than three headers" "$scratch/includes"
    symbols "$declare_all" >"$scratch/symbols"
    empty "$what: the declarations emit symbols" "$scratch/symbols"
    strangers "the declaration half" "$declare_all" '#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>'
    check "$what: declarations twice" compile "$declare_all
$declare_all" -fsyntax-only -Wall -Wextra -Werror

    # Implementation: our names, no globals that change.
    strangers "the implementation" "$implement" "$system_headers"
    symbols "$implement" --defined-only >"$scratch/all"
    awk '$2 ~ /^[A-Zu]$/ && $NF !~ /^(_ZN[0-9]+)?spdl_/ { print $NF }' "$scratch/all" \
        >"$scratch/symbols"
    empty "$what: the implementation exports names without the prefix" "$scratch/symbols"
    awk '$2 ~ /^[bBdDC]$/ { print $NF }' "$scratch/all" >"$scratch/symbols"
    empty "$what: the implementation has globals that can change" "$scratch/symbols"
    symbols "#define SPDL_STATIC
$implement" -g --defined-only >"$scratch/symbols"
    empty "$what: static mode exports" "$scratch/symbols"
    check "$what: implementation after declarations" compile "#include \"spdl.h\"
$implement
$declare_all" -fsyntax-only
    check "$what: implementation twice in a file" compile "$implement
$implement" -fsyntax-only
done

# What the text defines, whatever the compiler and the mode. One switch is the C library's, two are
# those of windows.h, and defined only for its include.
for header in $headers; do
    grep -nE '^[ ]*#[ ]*define' "$header" |
        grep -vE 'define[ ]+(SPDL_|spdl_|_FILE_OFFSET_BITS 64|WIN32_LEAN_AND_MEAN$|NOMINMAX$)' \
            >"$scratch/strangers"
    empty "$header defines macros without the prefix" "$scratch/strangers"
done
# Three switches for users, and two that the tests turn other systems' waits on with.
grep -oh 'SPDL_NO_[A-Z_]*' $headers | sort -u |
    grep -vxE 'SPDL_NO_(FUTEX|MEMBARRIER|NPZ|REPORT|THREADS)' >"$scratch/switches"
empty "switches that nobody has asked for" "$scratch/switches"

# What a switch leaves out is not declared and not there; what it leaves works.
switched() {
    language=$1
    shift
    $cc -x "$language" -w -O0 "$@" tests/switches.c -o "$scratch/switched" -lpthread &&
        timeout 60 "$scratch/switched"
}
if [ -n "$BRIEF" ]; then both=clang; else both="gcc clang"; fi
for cc in $both; do
    for switches in "" -DSPDL_NO_NPZ -DSPDL_NO_REPORT "-DSPDL_NO_NPZ -DSPDL_NO_REPORT" \
        -DSPDL_NO_THREADS "-DSPDL_NO_NPZ -DSPDL_NO_REPORT -DSPDL_NO_THREADS"; do
        # shellcheck disable=SC2086 # a list of options
        check "$cc: a pipeline with ${switches:-everything}" switched c $switches
    done
done
left_out() {
    cc=gcc language=c++ std=c++17
    symbols "#define SPDL_NO_REPORT
#define SPDL_NO_NPZ
$implement" >"$scratch/symbols" && [ -s "$scratch/symbols" ] &&
        ! grep -E 'npz|crc|inflate|doctor_run|doctor_text' "$scratch/symbols"
}
check "what the switches leave out is there" left_out

# No section but >>platform-impl, >>os and its twins names a system: no header, function, constant
# or path of one. Comments may.
names='pthread|futex|membarrier|syscall|mmap|munmap|socket|errno|strerror|__linux__|__APPLE__'
names="$names|_WIN32|__unix__|__GLIBC__|SYS_|STDERR_FILENO|ssize_t|off_t"
names="$names|struct (timespec|timeval|stat|rusage)|(O|MAP|PROT|LOCK|SIG)_[A-Z]"
calls='open|close|read|write|pread|pwrite|stat|fstat|flock|fcntl|dup2?|fsync|ftruncate|unlink|poll'
calls="$calls|isatty|getpid|gettid|get[eu]?[ug]id|sysconf|getrusage|nanosleep|usleep|rename"
calls="$calls|clock_gettime|gettimeofday|sched_yield|getauxval"
awk '/^\/\* =+ \*\/$/ { next }
    /^\/\* >>/ { off = $2 == ">>platform-impl" || $2 == ">>os" || $2 ~ /^>>os-/ }
    !off' spdl.h | gcc -w -fpreprocessed -dD -E -P -x c - >"$scratch/portable"
grep -nE "\b($names)|\b($calls)\(|\"/(proc|sys|dev)/|^#include" "$scratch/portable" |
    grep -vE '#include <(std(arg|bool|def|int|io|lib)|string|assert)\.h>' >"$scratch/systems"
empty "a system is named outside of its sections" "$scratch/systems"
awk '/^\/\* >>/ { on = $2 != ">>atomics-impl" } on' spdl.h | grep -nE '[^l]__atomic_|__sync_' \
    >"$scratch/atomics"
empty "an atomic builtin outside of >>atomics-impl" "$scratch/atomics"
# twin SECTION FILE: its functions, less one that is its own. Twins share the events of zeros.
twin() {
    awk -v on_in=">>$1" '/^\/\* >>/ { on = $2 == on_in } on && /^SPDL_(_PRIVATE|API)/
        on && /define SPDL__OS_ZERO_EVENT/ { print "spdl__os_event_init(\nspdl__os_event_fini(" }
        on && /define SPDL__OS_PLAIN/ {
            print "spdl__os_thread_number(\nspdl__os_thread_times(\nspdl__os_huge_pages("
        }' \
        spdl.h |
        grep -oE 'spdl_\w+\(' | sort -u >"$2"
}
twin os "$scratch/contract"
twin os-none "$scratch/none"
twin os-posix "$scratch/posix"
twin os-win32 "$scratch/win32"
count=$(wc -l <"$scratch/contract")
check ">>os has $count functions, more than 28" [ "$count" -le 28 ] # and 25 without the last three
for of in none posix win32; do
    comm -23 "$scratch/contract" "$scratch/$of" >"$scratch/missing"
    empty ">>os-$of lacks functions" "$scratch/missing"
done

# With SPDL_NO_THREADS the implementation needs C alone; so it does with a copy of that twin, as a
# port begins.
{
    echo '#define SPDL_NO_THREADS'
    awk '/^\/\* =+ \*\/$/ { next } /^\/\* >>/ { on = $2 == ">>os-none" } on' spdl.h |
        sed 's/^#if SPDL__ALONE$/#if 1/'
} >"$scratch/copy.h"
for job in gcc:SPDL_NO_THREADS clang:SPDL_NO_THREADS "gcc:SPDL_OS_HEADER=\"$scratch/copy.h\""; do
    cc=${job%%:*}
    check "$cc: the implementation with ${job#*:}" $cc -std=c99 -pedantic -Wall -Wextra \
        -Werror -DSPDL_IMPLEMENTATION "-D${job#*:}" -I. -fno-pie -x c -c spdl.h \
        -o "$scratch/none.o"
    nm -u "$scratch/none.o" | awk '{ print $NF }' |
        grep -vE '^(__cpu_[a-z_]*[0-9]?|_GLOBAL_OFFSET_TABLE_|__stack_chk_fail)$' |
        grep -vE '^(clock|time|getenv|malloc|free|qsort|remove|stderr|(mem|str)[a-z]*)$' |
        grep -vE '^(v?snprintf|f?printf|fput[cs]|putc|rename)$' |
        grep -vE '^f(open|close|read|write|seek|tell|error|flush)$' >"$scratch/symbols"
    empty "$cc: the implementation with ${job#*:} needs more than C" "$scratch/symbols"
done
wasi=/usr/include/wasm32-wasi # of wasi-libc
if [ -d $wasi ]; then
    for std in c99 c11 gnu17; do
        check "wasm32, $std: the implementation with SPDL_NO_THREADS" clang --target=wasm32-wasi \
            -isystem $wasi -std=$std -Wall -Wextra -Werror -DSPDL_IMPLEMENTATION \
            -DSPDL_NO_THREADS -fsyntax-only -x c spdl.h
    done
fi

# One unit implements, the other uses; either may be C++.
echo '#define SPDL_IMPLEMENTATION
#include "spdl.h"' >"$scratch/implement"
echo '#include "spdl.h"
int main(void) { return spdl_version()[0] != 48 + SPDL_VERSION_MAJOR; }' >"$scratch/use"

two_units() {
    cp "$scratch/implement" "$scratch/implement.$1"
    cp "$scratch/use" "$scratch/use.$2"
    gcc -I. -c "$scratch/implement.$1" -o "$scratch/implement.o" &&
        gcc -I. -c "$scratch/use.$2" -o "$scratch/use.o" &&
        g++ "$scratch/implement.o" "$scratch/use.o" -o "$scratch/linked" -lpthread &&
        "$scratch/linked"
}
# SPDL_API as README.md says it: what a shared library is made of has no symbols for others.
printf '#define SPDL_IMPLEMENTATION\n#include "spdl.h"\n' |
    "${CC:-cc}" -I. -O0 -w '-DSPDL_API=extern __attribute__((visibility("hidden")))' -xc -c \
        -o "$scratch/hidden.o" -
check "nothing hidden was compiled" [ -s "$scratch/hidden.o" ]
readelf -sW "$scratch/hidden.o" | grep -E 'GLOBAL +DEFAULT +[0-9]+ spdl_' >"$scratch/visible"
empty "symbols that SPDL_API does not hide" "$scratch/visible"

check "implemented in C, used in C++" two_units c cpp
check "implemented in C++, used in C" two_units cpp c

# A program that was compiled with another spdl.h is refused in a sentence; its desc is not read.
cat >"$scratch/rows.c" <<'USE'
#include "spdl.h"
SPDL_FN(none, void, int) { return SPDL_END; }
int main(void) {
    spdl_pipeline *p = 0;
    spdl_loader *l = 0;
    static spdl_loader_desc apart;
    return spdl_pipeline_create(&p, 0, SPDL_STAGES(SPDL_SOURCE(none), SPDL_SINK(3))) !=
               SPDL_E_INVALID || p ||
           spdl_loader_open(&l, &apart, SPDL_STAGES(SPDL_SOURCE(none), SPDL_SINK(3))) !=
               SPDL_E_INVALID || l;
}
USE
gcc -w -O0 -I. -xc -c "$scratch/implement" -o "$scratch/implement.o"
# mismatch TEXT SED: SED makes the other header
mismatch() {
    mkdir -p "$scratch/other"
    sed "$2" spdl.h >"$scratch/other/spdl.h"
    gcc -w -O0 -I"$scratch/other" "$scratch/rows.c" "$scratch/implement.o" -o "$scratch/linked" \
        -lpthread && "$scratch/linked" 2>"$scratch/said" && cat "$scratch/said" &&
        [ "$(grep -cE "$1" "$scratch/said")" = 2 ]
}
here=$(awk '/^#define SPDL_VERSION_(MAJOR|MINOR|PATCH) / { v = v "." $3 }
    END { print substr(v, 2) }' spdl.h)
check "another version" mismatch "compiled with spdl.h 7.8.9, but linked to $here" \
    's/^\(#define SPDL_VERSION_MAJOR\) .*/\1 7/; s/^\(#define SPDL_VERSION_MINOR\) .*/\1 8/
     s/^\(#define SPDL_VERSION_PATCH\) .*/\1 9/'
check "an older version" mismatch "compiled with an older spdl.h, but linked to $here" \
    '/^    unsigned layout_/d; s/\.layout_ = SPDL__LAYOUT,//'
for struct in spdl_stage spdl_pipeline_desc spdl_loader_desc; do
    check "a $struct with a field more" mismatch "compiled with another spdl.h $here, or after" \
        "s/^} $struct;/    void *one_more; } $struct;/"
done

# Rows in C++, without designated initialisers and with them; what is there for C++ alone.
runs_in_cpp() {
    file=$1
    std=$2
    shift 2
    g++ -std="$std" -I. "$@" "tests/$file.cpp" -o "$scratch/$file" -lpthread &&
        timeout 60 "$scratch/$file"
}
check "rows in c++11" runs_in_cpp rows c++11
check "throws, lambdas and owners in c++20" runs_in_cpp cpp c++20
[ -n "$BRIEF" ] || check "rows in c++20" runs_in_cpp rows c++20
[ -n "$BRIEF" ] || check "throws, lambdas and owners in c++11" runs_in_cpp cpp c++11
check "lambdas and owners without exceptions" runs_in_cpp cpp c++17 -fno-exceptions
check "throws and lambdas, and no data race" runs_in_cpp cpp c++17 -fsanitize=thread

# statement CODE OPTION ...: compiles it in a function that has pointers of all kinds
statement() {
    code=$1
    shift
    compile "#include \"spdl.h\"
typedef struct some some;
void use(spdl_pipeline *p, some *item, some **out, const char *text, int number);
SPDL_FN(stage, void, some) { *out = NULL; return SPDL_OK; }
void use(spdl_pipeline *p, some *item, some **out, const char *text, int number) {
    (void)p, (void)item, (void)out, (void)text, (void)number, (void)stage_is_no_SPDL_FN;
    $code;
}" -c -o "$scratch/statement.o" "$@"
}

# warned CODE WARNING: the compiler warns
warned() {
    ! statement "$1" "-Werror=$2" >"$scratch/said" 2>&1 && grep -F "$2" "$scratch/said"
}
# refused CODE TEXT: it does not compile, and the compiler says TEXT
refused() {
    ! statement "$1" -w >"$scratch/said" 2>&1 && grep -F "$2" "$scratch/said"
}
for compiler in gcc:c:c99 clang:c:c99 g++:c++:c++17 clang++:c++:c++11; do
    IFS=: read -r cc language std <<EOF
$compiler
EOF
    for right in '&item' out '&text'; do
        check "$cc -std=$std: SPDL_NEXT of $right" statement "if (SPDL_NEXT(p, $right, 0)) {}" \
            -O2 -Wall -Wextra -Wpedantic -Wcast-qual -Wstrict-aliasing=1 -Wstrict-aliasing=2 -Werror
    done
    for wrong in item number '&number' text; do
        check "$cc -std=$std: SPDL_NEXT of $wrong compiles" refused \
            "if (SPDL_NEXT(p, $wrong, 0)) {}" error
    done
    # Mistakes of newcomers that the compiler finds: what it shows them says what to write.
    check "$cc -std=$std: rows without SPDL_STAGES" refused \
        "(void)!spdl_pipeline_create(&p, NULL, SPDL_SOURCE(stage), SPDL_SINK(3))" "SPDL_STAGES("
    check "$cc -std=$std: SPDL_PIPE of what SPDL_FN did not make" refused \
        "spdl_stage rows[] = { SPDL_PIPE(number), SPDL_SINK(3) }" "number_is_no_SPDL_FN"
    check "$cc -std=$std: SPDL_NEXT without an address" refused "if (SPDL_NEXT(p, number, 0)) {}" \
        "$([ "$language" = c ] && echo 'the address of a pointer' || echo 'no matching function')"
    check "$cc -std=$std: create's result is ignored without a warning" warned \
        "spdl_pipeline_create(&p, NULL, SPDL_STAGES(SPDL_SOURCE(stage), SPDL_SINK(3)))" \
        unused-result
    check "$cc -std=$std: next's result is ignored without a warning" warned \
        "SPDL_NEXT(p, &item, 0)" unused-result
    check "$cc -std=$std: spdl_fail without return has no warning" warned \
        "spdl_fail(NULL, \"no\")" unused-result
    [ "$language" = c ] && continue
    for row in "SPDL_PIPE(stage, .concurrency = 4)" "SPDL_SOURCE(stage, .ctx = p)" \
        "SPDL_BRANCH(stage, .name = 0)" "SPDL_BATCH(4, .drop_last = true)" \
        "SPDL_FEED(some, .buffer_size = 2, .name = 0)" "SPDL_PATH(0, .buffer_size = 2)" \
        "SPDL_MERGE(.buffer_size = 2)" "SPDL_NPZ(NULL, .concurrency = 4)" \
        "SPDL_TAR(NULL, .concurrency = 4)" "SPDL_FILES(NULL, .name = 0)" \
        "SPDL_READ(.concurrency = 4)" "SPDL_BATCH_OF(int, 4, .name = 0)" \
        "SPDL_INDEX(NULL, .name = 0)"; do
        check "$cc -std=$std: what it says of $row" refused "(void)$row" \
            "before C++20 write SPDL_PIPE(fn).with_concurrency(4)"
    done
    for row in "spdl_pipe<some, some>(text, [=](spdl_task *, some *, some **to) {" \
        "spdl_source<some>(text, [=](spdl_task *, void *, some **to) {"; do
        check "$cc -std=$std: five captures in place compile" refused \
            "void *a = 0, *b = 0, *c = 0, *d = 0;
            (void)$row *to = item; return a == b && c == d ? SPDL_OK : SPDL_END; })" \
            "let it outlive the pipeline, and write &name"
    done
    check "$cc -std=$std: a capture with a destructor compiles" refused \
        "struct gone { ~gone() {} } last;
        (void)spdl_pipe<some, some>(text, [=](spdl_task *, some *, some **to) {
            (void)last; *to = item; return SPDL_OK; })" \
        "let it outlive the pipeline, and write &name"
    check "$cc -std=$std: SPDL_BATCH_OF a type with a destructor compiles" refused \
        "struct gone { ~gone() {} }; (void)SPDL_BATCH_OF(gone, 4)" \
        "SPDL_BATCH_OF copies items as bytes, which this type forbids"
    for row in "spdl_pipe<some, int>" "spdl_source<int>"; do
        check "$cc -std=$std: a lambda that $row cannot call" refused \
            "auto lambda = [&](spdl_task *, some *, some **to) { *to = item; return SPDL_OK; };
            (void)$row(text, lambda)" "the callable takes (spdl_task *, In *, Out **)"
    done
    for row in "spdl_pipe<some, some>:some" "spdl_source<some>:void"; do
        check "$cc -std=$std: a lambda of ${row%:*} that returns int" refused \
            "auto lambda = [](spdl_task *, ${row#*:} *, some **to) { *to = 0; return 0; };
            (void)${row%:*}(text, lambda)" "returns spdl_result in every return"
    done
done

# Licence: the text at the end of a header is that of LICENSE, but for spacing.
words() {
    tr -s ' \n' '\n\n' | grep -v '^$'
}
for header in $headers; do
    words <LICENSE >"$scratch/licence"
    awk '/MIT License$/ { text = ""; on = 1 }
        on { text = text $0 "\n" }
        END { printf "%s", text }' "$header" |
        sed -e 's/^.*MIT License$/MIT License/' -e 's/\*\/.*//' | words >"$scratch/at_the_end"
    check "$header: its licence is not that of LICENSE" \
        diff "$scratch/licence" "$scratch/at_the_end"
done

# Version: first line of the headers, macros, and the top entry of the change log.
version=$(awk '/^#define SPDL_VERSION_(MAJOR|MINOR|PATCH) / { v = v "." $3 }
    END { print substr(v, 2) }' spdl.h)
for header in $headers; do
    check "line 1 of $header does not say v$version" \
        grep -q "^1:/\* $header - v$version - " <<EOF
$(grep -n '' "$header" | head -n 1)
EOF
done
changed=$(sed -n 's/^## \[\([^]]*\)\].*/\1/p' CHANGELOG.md | head -n 1)
check "CHANGELOG.md starts with $changed, the header is $version" [ "$changed" = "$version" ]

# Tags: the contents list is what there is, in order.
for header in $headers; do
    awk '/CONTENTS/ { on = 1 } /^$/ { on = 0 } on' "$header" |
        grep -oE '>>[a-z-]+' >"$scratch/contents"
    grep -oE '^/\* >>[a-z-]+' "$header" | cut -c 4- >"$scratch/tags"
    check "$header: its contents are not its sections" diff "$scratch/contents" "$scratch/tags"
done
finish
