#!/bin/sh
# The headers compile after other headers and their macros: Qt, all of windows.h, X11, unix. And in
# every way that a program may build them: as a part of a unity build, as two private copies, with
# LTO. No compiler may print anything.
. "$(dirname "$0")/tally.sh"

defines() {
    for macro; do echo "#define $macro"; done
}
defines 'min(a,b) ((a)<(b)?(a):(b))' 'max(a,b) ((a)>(b)?(a):(b))' near far 'interface struct' \
    IN OUT \
    'ERROR 0' 'TRUE 1' 'FALSE 0' 'GetMessage GetMessageA' OPTIONAL 'CONST const' 'VOID void' \
    'small char' 'hyper long' 'CreateFile CreateFileA' 'DELETE 1' 'PASCAL' 'THIS' 'STRICT' \
    'DOMAIN 1' 'NO_ERROR 0' 'SendMessage SendMessageA' 'TEXT(x) L##x' >"$scratch/windows.h"
defines 'None 0L' 'Bool int' 'Status int' 'True 1' 'False 0' 'Always 2' 'Success 0' 'Complex 1' \
    'Above 0' 'Below 1' 'Unsorted 0' 'CursorShape 0' >"$scratch/x11.h"
defines 'major(x) ((x)>>8)' 'minor(x) ((x)&255)' 'makedev(x,y) 0' 'check(x) (x)' 'verify(x) (x)' \
    'require(x) (x)' 'LOG_INFO 6' 'swap(a,b) ((void)0)' 'likely(x) (x)' 'I 1i' \
    'container_of(a,b,c) 0' 'PAGE_SIZE 4096' 'ALIGN(x) x' 'howmany(a,b) 0' 'UNUSED' \
    'roundup(x,y) (x)' 'assert_true(x) (x)' 'fail() 0' 'isset(a,i) 0' >"$scratch/unix.h"
defines slots 'signals public' emit 'foreach for' 'forever for(;;)' Q_SLOTS >"$scratch/qt.h"

clean() {
    "$@" >"$scratch/said" 2>&1 && [ ! -s "$scratch/said" ] && return
    cat "$scratch/said"
    return 1
}
include() {
    printf '#include "%s"\n' "$@"
}

for group in windows x11 unix qt; do
    for mode in "" -DSPDL_IMPLEMENTATION "-DSPDL_IMPLEMENTATION -DSPDL_CUDA_IMPLEMENTATION"; do
        for how in "gcc -std=gnu11 -xc" "g++ -std=c++17 -xc++" "clang++ -std=c++20 -xc++"; do
            include "$group.h" spdl.h spdl_cuda.h >"$scratch/use"
            # shellcheck disable=SC2086 # lists of options
            check "after $group.h: ${mode:-declarations}, $how" clean $how -fsyntax-only -I. \
                -I"$scratch" $mode "$scratch/use"
        done
    done
done

implement='#define SPDL_IMPLEMENTATION
#include "spdl.h"'
names=min,node,worker,slot,row,item,edge,pool,task,file,line,name,count,batch,layout
{
    echo "extern int $names;"
    echo "$implement"
    echo '#include "spdl.h"'
} >"$scratch/unity.c"
check "in a unity build, after plain names" clean gcc -fsyntax-only -I. -Wall "$scratch/unity.c"
for unit in a b; do
    printf '#define SPDL_STATIC\n%s\nint %s(void);\nint %s(void) { return !spdl_version(); }\n' \
        "$implement" $unit $unit >"$scratch/$unit.c"
done
echo 'int a(void), b(void); int main(void) { return a() + b(); }' >"$scratch/ab.c"
check "two private copies" clean gcc -O0 -I. -Wall -Wextra "$scratch/a.c" "$scratch/b.c" \
    "$scratch/ab.c" -o "$scratch/ab" -lpthread

cat >"$scratch/user.cc" <<'USER'
#include "spdl.h"
#include <memory>
static spdl_result none(spdl_task *, void *, int **) { return SPDL_END; }
int main() {
    spdl_pipeline *p;
    spdl_pipeline_desc desc = {};
    const auto rows = SPDL_STAGES(spdl_source<int>("none", none), SPDL_SINK(3));
    const spdl_result made = spdl_pipeline_create(&p, &desc, rows);
    while (auto item = spdl_next<std::unique_ptr<int>>(p)) {}
    return made;
}
USER
all="-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wsign-conversion -Wold-style-cast
    -Wzero-as-null-pointer-constant -Wuseless-cast -Wnon-virtual-dtor -Wextra-semi"
for std in 11 14 17 20 23; do
    # shellcheck disable=SC2086 # a list of options
    check "a program in C++$std with all warnings" clean g++ -std=c++$std -fsyntax-only -I. $all \
        "$scratch/user.cc"
done
echo "$implement" >"$scratch/implement.c"
lto="-flto=auto -O1 -Wlto-type-mismatch -I."
with_lto() {
    # shellcheck disable=SC2086 # a list of options
    clean gcc $lto -c "$scratch/implement.c" -o "$scratch/implement.o" &&
        clean g++ -std=c++20 $lto -Wodr -c "$scratch/user.cc" -o "$scratch/user.o" &&
        clean g++ $lto -Wodr "$scratch/implement.o" "$scratch/user.o" -o "$scratch/user" -lpthread
}
check "with LTO, implemented in C, used in C++" with_lto
finish
