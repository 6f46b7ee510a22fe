/* poison.h - what a program may include before spdl.h; then words that MSVC has not. */
#include <assert.h>
#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <wchar.h>

#include <intrin.h>
#pragma GCC poison __builtin_expect __atomic_load_n __atomic_store_n __atomic_exchange_n
#pragma GCC poison __atomic_fetch_add __atomic_fetch_sub __atomic_fetch_or
#pragma GCC poison __atomic_compare_exchange_n __atomic_thread_fence __atomic_signal_fence
#pragma GCC poison __builtin_prefetch __builtin_ia32_pause __builtin_bswap64 __builtin_clzll
#pragma GCC poison __builtin_ctz __builtin_cpu_supports __builtin_huge_val
#pragma GCC poison __builtin_ia32_pclmulqdq128 __extension__ __int128 __attribute__ typeof
#pragma GCC poison __typeof__ __asm__ asm __PRETTY_FUNCTION__
