// Prints how many fp32 numbers from 0 to infinity have another root in the AVX-512 kernel than by the instruction.
#include "kernel.cpp"

#include <cstdio>

#pragma GCC target("fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,prefer-vector-width=512")

int main() {
    long different = 0;
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (uint32_t bits = 0; bits <= 0x7F800000u; bits += 16) {
        const __m512 value = _mm512_castsi512_ps(_mm512_add_epi32(_mm512_set1_epi32((int32_t)bits), lanes));
        const __m512i ours = _mm512_castps_si512(avx512::square_root(value));
        const __m512i theirs = _mm512_castps_si512(_mm512_sqrt_ps(value));
        const int valid = bits == 0x7F800000u ? 1 : 0xFFFF;  // what follows infinity is no number
        different += __builtin_popcount(valid & _mm512_cmpneq_epi32_mask(ours, theirs));
    }
    std::printf("%ld\n", different);
}
