// The vectors of AVX2: 8 lanes of 32 bits. Included by kernel.cpp before wide.inl.

constexpr int kWidth = 8;
using Floats = __m256;
using Ints = __m256i;

INLINE Ints zero() { return _mm256_setzero_si256(); }
INLINE Ints all(int32_t value) { return _mm256_set1_epi32(value); }
INLINE Ints all_16(int16_t value) { return _mm256_set1_epi16(value); }
INLINE Floats all(float value) { return _mm256_set1_ps(value); }
INLINE Floats as_floats(Ints bits) { return _mm256_castsi256_ps(bits); }
INLINE Ints as_ints(Floats values) { return _mm256_castps_si256(values); }
INLINE Floats load(const float* from) { return _mm256_loadu_ps(from); }
INLINE Ints load(const void* from) { return _mm256_loadu_si256((const __m256i*)from); }
INLINE Ints load_8(const uint8_t* from) { return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)from)); }
INLINE void store(float* to, Floats values) { _mm256_storeu_ps(to, values); }
INLINE void store(void* to, Ints values) { _mm256_storeu_si256((__m256i*)to, values); }
INLINE Ints and_(Ints a, Ints b) { return _mm256_and_si256(a, b); }
INLINE void store_8(uint8_t* to, Ints values) {
    values = and_(values, all_16(255));
    __m128i first = _mm256_castsi256_si128(values), second = _mm256_extracti128_si256(values, 1);
    _mm_storeu_si128((__m128i*)to, _mm_packus_epi16(first, second));
}
INLINE Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
INLINE Floats subtract(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
INLINE Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
INLINE Floats fused(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
INLINE Floats divide(Floats a, Floats b) { return _mm256_div_ps(a, b); }
INLINE Floats square_root(Floats a) { return _mm256_sqrt_ps(a); }
INLINE Ints add(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
INLINE Ints add_16(Ints a, Ints b) { return _mm256_add_epi16(a, b); }
INLINE Ints or_(Ints a, Ints b) { return _mm256_or_si256(a, b); }
INLINE Floats with_sign_of(Floats a, Floats positive, Floats sign) {
    return as_floats(or_(and_(as_ints(a), as_ints(sign)), as_ints(positive)));
}
INLINE Ints larger(Ints a, Ints b) { return _mm256_max_epi32(a, b); }
INLINE Ints larger_16(Ints a, Ints b) { return _mm256_max_epi16(a, b); }
INLINE Ints shift_left_16(Ints a, int by) { return _mm256_slli_epi16(a, by); }
INLINE Ints shift_right_16(Ints a, int by) { return _mm256_srai_epi16(a, by); }
INLINE Ints shift_right_zeros_16(Ints a, int by) { return _mm256_srli_epi16(a, by); }
INLINE Ints shift_right_zeros(Ints a, int by) { return _mm256_srli_epi32(a, by); }
INLINE Ints unpack_lo(Ints a, Ints b) { return _mm256_unpacklo_epi16(a, b); }
INLINE Ints unpack_hi(Ints a, Ints b) { return _mm256_unpackhi_epi16(a, b); }
INLINE Ints pack_unsigned(Ints lo, Ints hi) { return _mm256_packus_epi32(lo, hi); }
INLINE Ints pack_low_halves(Ints lo, Ints hi) { return pack_unsigned(and_(lo, all(0xFFFF)), and_(hi, all(0xFFFF))); }
INLINE Ints pack_high_halves(Ints lo, Ints hi) {
    return pack_unsigned(shift_right_zeros(lo, 16), shift_right_zeros(hi, 16));
}
INLINE Floats larger_magnitude(Floats positive, Floats other) {
    return as_floats(larger(as_ints(positive), and_(as_ints(other), all(0x7FFFFFFF))));
}
INLINE Floats broadcast(__m128 value) { return _mm256_broadcastss_ps(value); }
// The largest lanes of both in the two lowest lanes.
INLINE __m128 largest_of_both(Ints a, Ints b) {
    const __m256i half = _mm256_max_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
    const __m128i quarter = _mm_max_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    return _mm_castsi128_ps(_mm_max_epi32(quarter, _mm_unpackhi_epi64(quarter, quarter)));
}

struct Pair {
    Floats lo, hi;
};

INLINE Pair load_pair(const float* from) {
    Floats first = load(from), second = load(from + kWidth);
    return {_mm256_permute2f128_ps(first, second, 0x20), _mm256_permute2f128_ps(first, second, 0x31)};
}

INLINE void store_pair(float* to, Pair values) {
    store(to, _mm256_permute2f128_ps(values.lo, values.hi, 0x20));
    store(to + kWidth, _mm256_permute2f128_ps(values.lo, values.hi, 0x31));
}

// bf16 numbers as fp32.
INLINE Pair widened(Ints halves) {
    return {as_floats(unpack_lo(zero(), halves)), as_floats(unpack_hi(zero(), halves))};
}

// The values of 4 kWidth codes, in two pairs.
INLINE void decode_m(const uint8_t* from, Pair to[2]) {
    const Floats zero = all(Momentum::zero);
    for (int half = 0; half < 2; ++half) {
        Ints codes = load_8(from + half * 2 * kWidth);
        Ints bits = and_(shift_left_16(codes, Momentum::shift - 16), all_16(Momentum::top << (Momentum::shift - 16)));
        Ints signs = and_(shift_left_16(codes, 8), all_16(INT16_MIN));
        Pair values = widened(or_(bits, all_16(Momentum::base >> 16)));
        values = {subtract(values.lo, zero), subtract(values.hi, zero)};
        Pair sign = widened(signs);
        to[half] = {as_floats(or_(as_ints(sign.lo), as_ints(values.lo))),
                    as_floats(or_(as_ints(sign.hi), as_ints(values.hi)))};
    }
}

// The floats that 4 kWidth codes are pieces of, in two pairs.
INLINE void floats_of_v(const uint8_t* from, Pair to[2]) {
    for (int half = 0; half < 2; ++half) {
        Ints bits = shift_left_16(load_8(from + half * 2 * kWidth), RootVariance::shift - 16);
        to[half] = widened(or_(bits, all_16(RootVariance::base >> 16)));
    }
}

// Codes, cut from the high halves of 4 kWidth fp32 numbers.
INLINE void store_m(uint8_t* to, const Ints halves[2]) {
    for (int half = 0; half < 2; ++half) {
        Ints signs = and_(shift_right_zeros_16(halves[half], 8), all_16(128));
        Ints magnitudes = and_(shift_right_zeros_16(halves[half], Momentum::shift - 16), all_16(Momentum::top));
        store_8(to + half * 2 * kWidth, or_(signs, magnitudes));
    }
}

INLINE void store_v(uint8_t* to, const Ints halves[2]) {
    for (int half = 0; half < 2; ++half)
        store_8(to + half * 2 * kWidth, shift_right_zeros_16(halves[half], RootVariance::shift - 16));
}
