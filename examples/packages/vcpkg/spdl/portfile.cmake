# vcpkg install spdl --overlay-ports=examples/packages/vcpkg
get_filename_component(SOURCE_PATH "${CURRENT_PORT_DIR}/../../../.." ABSOLUTE)
set(VCPKG_BUILD_TYPE release) # headers alone
file(INSTALL "${SOURCE_PATH}/spdl.h" "${SOURCE_PATH}/spdl_cuda.h"
     DESTINATION "${CURRENT_PACKAGES_DIR}/include")
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
file(WRITE "${CURRENT_PACKAGES_DIR}/share/${PORT}/usage"
     "spdl: define SPDL_IMPLEMENTATION in one file before its #include; link Threads::Threads\n")
