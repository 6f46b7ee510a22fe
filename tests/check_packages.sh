#!/bin/sh
# `make install`, and the recipes in examples/packages with each tool that is there: pkg-config,
# CMake, Meson and Conan build a program that runs. vcpkg is in no distribution: its port file runs
# in CMake, with stand-ins for what vcpkg has set.
. "$(dirname "$0")/tally.sh"
export CC="${CC:-cc}" CFLAGS=-O0
unset MAKEFLAGS MFLAGS MAKELEVEL MAKEOVERRIDES PKG_CONFIG_LIBDIR CMAKE_PREFIX_PATH
version=$(sed -n '1s/.* v\([0-9.]*\) .*/\1/p' spdl.h)

# In a copy, as tools leave files beside a recipe.
mkdir -p "$scratch/spdl/examples"
cp -pR spdl.h spdl_cuda.h LICENSE Makefile "$scratch/spdl"
cp -pR examples/packages "$scratch/spdl/examples"
cd "$scratch/spdl" || exit 1
recipes=examples/packages
prefix=$scratch/usr
PKG_CONFIG_PATH=$prefix/share/pkgconfig
export PKG_CONFIG_PATH

have() {
    for tool; do
        command -v "$tool" >/dev/null 2>&1 || { skip "no $tool" && return 1; }
    done
}

# runs PROGRAM: it prints the version of this header
runs() {
    [ "$("$1")" = "spdl $version: 45" ]
}

check "make install" make -s install PREFIX="$prefix"
check "make install into DESTDIR" make -s install PREFIX=/usr DESTDIR="$scratch/staged"
check "what is staged names its PREFIX" \
    grep -qx 'prefix=/usr' "$scratch/staged/usr/share/pkgconfig/spdl.pc"
(cd "$prefix" && find . -type f) | sort >"$scratch/installed"
(cd "$scratch/staged/usr" && find . -type f) | sort >"$scratch/staged.list"
check "six files are installed" [ "$(wc -l <"$scratch/installed")" -eq 6 ]
check "the same files in both places" diff "$scratch/installed" "$scratch/staged.list"
check "make uninstall" make -s uninstall PREFIX=/usr DESTDIR="$scratch/staged"
find "$scratch/staged" -type f -o -path '*spdl*' >"$scratch/left"
empty "make uninstall leaves" "$scratch/left"
grep -rl '@[A-Z]*@' "$prefix" >"$scratch/unfilled"
empty "installed without its values" "$scratch/unfilled"

if have pkg-config; then
    check "pkg-config --modversion" [ "$(pkg-config --modversion spdl)" = "$version" ]
    # shellcheck disable=SC2046 # options
    check "pkg-config: compiles" "$CC" -O0 $recipes/main.c -o "$scratch/main" \
        $(pkg-config --cflags --libs spdl)
    check "pkg-config: runs" runs "$scratch/main"
fi

# configure FOLDER OPTION ...: with cmake, into $scratch/FOLDER
configure() {
    cmake -S "$recipes/$1" -B "$scratch/$1" "-DCMAKE_C_COMPILER=$CC" "$@"
}
if have cmake; then
    check "cmake find_package: configures" configure cmake "-DCMAKE_PREFIX_PATH=$prefix"
    check "cmake find_package: builds" cmake --build "$scratch/cmake"
    check "cmake find_package: runs" runs "$scratch/cmake/program"
    for wanted in "${version%.*}:0" "$version:0" "${version%%.*}.99:1" "99:1"; do
        printf 'cmake_minimum_required(VERSION 3.14)\nproject(p C)\nfind_package(spdl %s)\n%s\n' \
            "${wanted%:*}" 'if(NOT spdl_FOUND)
message(FATAL_ERROR none)
endif()' >"$scratch/CMakeLists.txt"
        cmake -S "$scratch" -B "$scratch/find" "-DCMAKE_PREFIX_PATH=$prefix" >"$scratch/said" 2>&1
        check "cmake: find_package(spdl ${wanted%:*})" [ $? -eq "${wanted#*:}" ]
    done
    tar -czf "$scratch/spdl.tar.gz" -C "$scratch" spdl
    check "cmake FetchContent: configures" configure fetch "-DSPDL_URL=$scratch/spdl.tar.gz"
    check "cmake FetchContent: builds" cmake --build "$scratch/fetch"
    check "cmake FetchContent: runs" runs "$scratch/fetch/program"

    cat >"$scratch/port.cmake" <<'END'
function(vcpkg_install_copyright)
    cmake_parse_arguments(arg "" "" FILE_LIST ${ARGN})
    file(INSTALL ${arg_FILE_LIST} DESTINATION "${CURRENT_PACKAGES_DIR}/share/spdl")
endfunction()
set(PORT spdl)
include("${CURRENT_PORT_DIR}/portfile.cmake")
END
    check "the port file of vcpkg" cmake "-DCURRENT_PORT_DIR=$PWD/$recipes/vcpkg/spdl" \
        "-DCURRENT_PACKAGES_DIR=$scratch/vcpkg" -P "$scratch/port.cmake"
    check "the port installs headers and licence" \
        [ -e "$scratch/vcpkg/include/spdl.h" -a -e "$scratch/vcpkg/share/spdl/LICENSE" ]
fi
check "vcpkg.json says another version than $version" \
    grep -qF "\"version\": \"$version\"" $recipes/vcpkg/spdl/vcpkg.json

if have meson ninja; then
    check "meson: configures" meson setup "$scratch/meson" $recipes/meson
    check "meson: builds" ninja -C "$scratch/meson"
    check "meson: runs" runs "$scratch/meson/program"
fi

PATH=$PATH:$OLDPWD/build/conan/bin # where .ci/run puts it
if have conan cmake; then
    CONAN_HOME=$scratch/conan
    export CONAN_HOME
    check "conan: a profile" env -u CC conan profile detect
    check "conan: creates the package, and runs a program with it" \
        conan create $recipes/conan -s build_type=Debug
fi
finish
