// The vectors of AVX-512 (F, BW, DQ, VL, VBMI): 16 lanes of 32 bits. Included by kernel.cpp before wide.inl.

constexpr int kWidth = 16;
using Floats = __m512;
using Ints = __m512i;

INLINE Ints zero() { return _mm512_setzero_si512(); }
INLINE Ints all(int32_t value) { return _mm512_set1_epi32(value); }
INLINE Ints all_16(int16_t value) { return _mm512_set1_epi16(value); }
INLINE Floats all(float value) { return _mm512_set1_ps(value); }
INLINE Floats as_floats(Ints bits) { return _mm512_castsi512_ps(bits); }
INLINE Ints as_ints(Floats values) { return _mm512_castps_si512(values); }
INLINE Floats load(const float* from) { return _mm512_loadu_ps(from); }
INLINE Ints load(const void* from) { return _mm512_loadu_si512(from); }
INLINE void store(float* to, Floats values) { _mm512_storeu_ps(to, values); }
INLINE void store(void* to, Ints values) { _mm512_storeu_si512(to, values); }
INLINE Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
INLINE Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
INLINE Floats fused(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
INLINE Floats divide(Floats a, Floats b) { return _mm512_div_ps(a, b); }
INLINE Floats square_root(Floats a) { return _mm512_sqrt_ps(a); }
INLINE Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
INLINE Ints add_16(Ints a, Ints b) { return _mm512_add_epi16(a, b); }
// The sign of `a` and the magnitude of a number that is not negative; `sign` is the bit of signs.
INLINE Floats with_sign_of(Floats a, Floats positive, Floats sign) {
    return as_floats(_mm512_ternarylogic_epi32(as_ints(a), as_ints(positive), as_ints(sign), 0xEC));
}
INLINE Ints larger(Ints a, Ints b) { return _mm512_max_epi32(a, b); }
INLINE Ints larger_16(Ints a, Ints b) { return _mm512_max_epi16(a, b); }
INLINE Ints shift_left_16(Ints a, int by) { return _mm512_slli_epi16(a, by); }
INLINE Ints shift_right_16(Ints a, int by) { return _mm512_srai_epi16(a, by); }
INLINE Ints shift_right_zeros_16(Ints a, int by) { return _mm512_srli_epi16(a, by); }
INLINE Ints shift_right_zeros(Ints a, int by) { return _mm512_srli_epi32(a, by); }
INLINE Ints unpack_lo(Ints a, Ints b) { return _mm512_unpacklo_epi16(a, b); }
INLINE Ints unpack_hi(Ints a, Ints b) { return _mm512_unpackhi_epi16(a, b); }
INLINE Floats larger_magnitude(Floats positive, Floats other) {
    return _mm512_range_ps(positive, other, 0b1011);  // the larger absolute value, its sign cleared
}
INLINE Floats broadcast(__m128 value) { return _mm512_broadcastss_ps(value); }
// The largest lanes of both in the two lowest lanes.
INLINE __m128 largest_of_both(Ints a, Ints b) {
    const __m512i mixed = _mm512_max_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    const __m256i half = _mm256_max_epi32(_mm512_castsi512_si256(mixed), _mm512_extracti64x4_epi64(mixed, 1));
    const __m128i quarter = _mm_max_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    return _mm_castsi128_ps(_mm_max_epi32(quarter, _mm_unpackhi_epi64(quarter, quarter)));
}

struct Pair {
    Floats lo, hi;
};

INLINE Pair load_pair(const float* from) {
    Floats first = load(from), second = load(from + kWidth);
    return {_mm512_shuffle_f32x4(first, second, 0x88), _mm512_shuffle_f32x4(first, second, 0xDD)};
}

INLINE void store_pair(float* to, Pair values) {
    const Ints first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const Ints second = add(first, all(8));
    store(to, _mm512_permutex2var_ps(values.lo, first, values.hi));
    store(to + kWidth, _mm512_permutex2var_ps(values.lo, second, values.hi));
}

// bf16 numbers as fp32.
INLINE Pair widened(Ints halves) {
    return {as_floats(unpack_lo(zero(), halves)), as_floats(unpack_hi(zero(), halves))};
}

// Where permutations of two vectors find what they pick: the 16-bit halves of a Pair in order, and every second byte.
struct Places {
    int16_t low_halves[32], high_halves[32];
    uint8_t even_bytes[64], odd_bytes[64];

    constexpr Places() : low_halves(), high_halves(), even_bytes(), odd_bytes() {
        for (int i = 0; i < 32; ++i) {
            low_halves[i] = (int16_t)(i % 8 / 4 * 32 + i / 8 * 8 + i % 4 * 2);
            high_halves[i] = (int16_t)(low_halves[i] + 1);
        }
        for (int i = 0; i < 64; ++i) {
            even_bytes[i] = (uint8_t)(2 * i);
            odd_bytes[i] = (uint8_t)(2 * i + 1);
        }
    }
};

// The values of m's 128 magnitudes as bf16 numbers, which they are, in two tables of bytes. In units of 2^-11 they are
// (16 + mantissa) * 2^exponent - 16.
struct Magnitudes {
    uint8_t low[128], high[128];

    constexpr Magnitudes() : low(), high() {
        for (int code = 0; code < 128; ++code) {
            const int units = ((16 + code % 16) << code / 16) - 16;
            int top = 0;
            while (units >> top > 1) ++top;
            const int bits = units ? ((127 - 11 + top) << 7) + (units << 7 >> top) - 128 : 0;
            low[code] = (uint8_t)bits;
            high[code] = (uint8_t)(bits >> 8);
        }
    }
};

alignas(64) constexpr Places kPlaces;
alignas(64) constexpr Magnitudes kMagnitudes;

INLINE Ints pack_low_halves(Ints lo, Ints hi) { return _mm512_permutex2var_epi16(lo, load(kPlaces.low_halves), hi); }

INLINE Ints pack_high_halves(Ints lo, Ints hi) { return _mm512_permutex2var_epi16(lo, load(kPlaces.high_halves), hi); }

INLINE Ints bytes_at(const uint8_t places[64], const Ints words[2]) {
    return _mm512_permutex2var_epi8(words[0], load(places), words[1]);
}

INLINE Ints looked_up(const uint8_t table[128], Ints codes) {
    return _mm512_permutex2var_epi8(load(table), codes, load(table + 64));
}

// 64 codes, so that unpacking their bytes gives words in order.
INLINE Ints load_codes(const uint8_t* from) {
    return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), load((const void*)from));
}

// The values of 4 kWidth codes, in two pairs.
INLINE void decode_m(const uint8_t* from, Pair to[2]) {
    Ints codes = load_codes(from);
    Ints low = looked_up(kMagnitudes.low, codes), high = looked_up(kMagnitudes.high, codes);
    high = _mm512_ternarylogic_epi32(codes, high, all((int32_t)0x80808080), 0xEC);  // codes & 0x80.. | high
    to[0] = widened(_mm512_unpacklo_epi8(low, high));
    to[1] = widened(_mm512_unpackhi_epi8(low, high));
}

// The floats that 4 kWidth codes are pieces of, in two pairs.
INLINE void floats_of_v(const uint8_t* from, Pair to[2]) {
    constexpr int kUp = RootVariance::shift - 16;
    Ints codes = load_codes(from), base = _mm512_set1_epi8(RootVariance::base >> (24 + kUp));
    const Ints words[2] = {_mm512_unpacklo_epi8(codes, base), _mm512_unpackhi_epi8(codes, base)};
    for (int half = 0; half < 2; ++half) {
        to[half] = widened(shift_left_16(words[half], kUp));
    }
}

INLINE void shift_both(Ints to[2], const Ints from[2], int by) {
    to[0] = shift_right_zeros_16(from[0], by);
    to[1] = shift_right_zeros_16(from[1], by);
}

// Codes, cut from the high halves of 4 kWidth fp32 numbers.
INLINE void store_m(uint8_t* to, const Ints halves[2]) {
    Ints shifted[2];
    shift_both(shifted, halves, Momentum::shift - 16);
    Ints signs = bytes_at(kPlaces.odd_bytes, halves), magnitudes = bytes_at(kPlaces.even_bytes, shifted);
    const Ints sign_bits = all((int32_t)0x80808080);
    store((void*)to, _mm512_ternarylogic_epi32(sign_bits, signs, magnitudes, 0xCA));  // where sign_bits, signs
}

INLINE void store_v(uint8_t* to, const Ints halves[2]) {
    Ints shifted[2];
    shift_both(shifted, halves, RootVariance::shift - 16);
    store((void*)to, bytes_at(kPlaces.even_bytes, shifted));
}
