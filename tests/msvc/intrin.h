/* intrin.h - what spdl.h takes from Microsoft's <intrin.h>, for clang in its MSVC mode. */
#pragma once
#ifdef __cplusplus
extern "C" {
#endif
typedef struct __m128i { long long x[2]; } __m128i;
void _ReadWriteBarrier(void);
unsigned char _BitScanReverse(unsigned long *, unsigned long);
unsigned char _BitScanForward(unsigned long *, unsigned long);
unsigned char _BitScanReverse64(unsigned long *, unsigned __int64);
long _InterlockedCompareExchange(long volatile *, long, long);
__int64 _InterlockedCompareExchange64(__int64 volatile *, __int64, __int64);
int __iso_volatile_load32(const volatile int *);
__int64 __iso_volatile_load64(const volatile __int64 *);
void __iso_volatile_store32(volatile int *, int);
void __iso_volatile_store64(volatile __int64 *, __int64);
void _mm_pause(void);
void _mm_mfence(void);
__m128i _mm_loadl_epi64(const __m128i *);
void _mm_storel_epi64(__m128i *, __m128i);
unsigned __int32 __ldar32(volatile unsigned __int32 *);
unsigned __int64 __ldar64(volatile unsigned __int64 *);
void __stlr32(volatile unsigned __int32 *, unsigned __int32);
void __stlr64(volatile unsigned __int64 *, unsigned __int64);
void __dmb(unsigned);
void __isb(unsigned);
#define _ARM64_BARRIER_ISH 11
#define _ARM64_BARRIER_SY 15
unsigned __int64 _byteswap_uint64(unsigned __int64);
#ifdef __cplusplus
}
#endif
