// The arithmetic of one AdamW step in plain loops, for any processor; compilers vectorise them. Included by kernel.cpp
// once per instruction set. The operations and their order are those of ../adamw.py and ../codes.py, and the build
// forbids contraction to fused multiply-adds: every instruction set gives the same bits.

template <class C>
INLINE int32_t sign_of(int32_t bits) {
    return C::is_signed ? bits & INT32_MIN : 0;
}

template <class C>
INLINE float decode(uint8_t code) {
    float magnitude = as_float((code & C::top) << C::shift | C::base) - C::zero;
    return as_float(as_int(magnitude) | sign_of<C>((int32_t)((uint32_t)code << 24)));
}

// `word` is the dither, `inverse` is 1 / scale.
template <class C>
INLINE uint8_t encode(float value, float inverse, uint32_t word) {
    int32_t sign = sign_of<C>(as_int(value));
    int32_t bits = as_int(value * inverse + as_float(as_int(C::zero) | sign));
    bits = C::is_signed || bits > C::base ? bits : C::base;
    bits = (int32_t)((uint32_t)bits + (word >> (32 - C::shift)));
    return (uint8_t)((bits >> C::shift & C::top) | (C::is_signed ? bits >> 24 & 128 : 0));
}

template <int kMaster>
INLINE float read_weight(const Block& b, int64_t i) {
    if (kMaster == kPlain) return ((const float*)b.weights)[i];
    uint32_t high = (uint32_t)((const uint16_t*)b.weights)[i] << 16;
    return as_float((int32_t)(kMaster == kSplit ? high + (uint32_t)(int32_t)b.low[i] : high));
}

template <int kMaster>
INLINE void write_weight(const Block& b, int64_t i, float weight, uint32_t word) {
    if (kMaster == kPlain) {
        ((float*)b.weights)[i] = weight;
        return;
    }
    uint32_t bits = (uint32_t)as_int(weight);
    if (kMaster == kSplit) b.low[i] = (int16_t)bits;
    ((uint16_t*)b.weights)[i] = (uint16_t)((bits + (kMaster == kSplit ? 0x8000u : word >> 16)) >> 16);
}

// The weight's move by the new `m` and `v`; returns sqrt(v).
template <int kMaster>
INLINE float move(const Task& t, const Block& b, int64_t i, uint32_t word, float m, float v) {
    float root = __builtin_sqrtf(v);
    float denominator = root * t.root_factor + t.eps_term;
    float weight = read_weight<kMaster>(b, i) * t.decay + m / denominator;
    if (t.moves) write_weight<kMaster>(b, i, weight, word);
    return root;
}

// 8-bit states: read, updated, and encoded again while the block lies in the first-level cache.
template <bool kHalf, int kMaster>
static void step_8bit(const Task t, const Block b, float* scratch) {
    float *ms = scratch, *roots = scratch + b.numel;
    const float m_scale = *b.m_scale * t.beta1, v_scale = *b.v_scale * *b.v_scale * t.beta2;
    int32_t m_largest = 0, v_largest = 0;
#pragma omp simd reduction(max : m_largest, v_largest)
    for (int64_t i = 0; i < b.numel; ++i) {
        float gradient = read_gradient<kHalf>(b.gradient, i);
        float m = decode<Momentum>(b.m_codes[i]) * m_scale + gradient * t.gradient_factor;
        float kept = decode<RootVariance>(b.v_codes[i]);
        float v = (kept * kept) * v_scale + (gradient * gradient) * t.square_factor;
        float root = move<kMaster>(t, b, i, b.weight_word + (uint32_t)i * kPerWeight, m, v);
        ms[i] = m;
        roots[i] = root;
        int32_t magnitude = as_int(m) & 0x7FFFFFFF;
        m_largest = magnitude > m_largest ? magnitude : m_largest;
        v_largest = as_int(root) > v_largest ? as_int(root) : v_largest;
    }
    *b.m_scale = scale_of<Momentum>(m_largest);
    *b.v_scale = scale_of<RootVariance>(v_largest);
    const float m_inverse = 1.0f / *b.m_scale, v_inverse = 1.0f / *b.v_scale;
#pragma omp simd
    for (int64_t i = 0; i < b.numel; ++i) {
        uint32_t word = b.code_word + (uint32_t)i * kPerLane;
        b.m_codes[i] = encode<Momentum>(ms[i], m_inverse, word);
        b.v_codes[i] = encode<RootVariance>(roots[i], v_inverse, word);
    }
}

template <bool kHalf, int kMaster>
static void step_fp32(const Task t, const Block b) {
#pragma omp simd
    for (int64_t i = 0; i < b.numel; ++i) {
        float gradient = read_gradient<kHalf>(b.gradient, i);
        b.m[i] = b.m[i] * t.beta1 + gradient * t.gradient_factor;
        b.v[i] = b.v[i] * t.beta2 + (gradient * gradient) * t.square_factor;
        move<kMaster>(t, b, i, b.weight_word + (uint32_t)i * kPerWeight, b.m[i], b.v[i]);
    }
}

// The square of an fp32 number is exact in fp64, so a fused addition, where there is one, gives the same bits.
INLINE double plus_square(double sum, double value) {
#if WIDE
    return __builtin_fma(value, value, sum);
#else
    return sum + value * value;
#endif
}

// Sum of squares in fp64, in kSums running sums that are added up in order: the same bits for every instruction set.
template <bool kHalf>
static double squares_of(const void* gradient, int64_t first, int64_t last) {
    double sums[kSums] = {};
    int64_t at = first;
    for (; at + kSums <= last; at += kSums) {
#pragma omp simd
        for (int i = 0; i < kSums; ++i) sums[i] = plus_square(sums[i], read_gradient<kHalf>(gradient, at + i));
    }
    for (int i = 0; at < last; ++at, ++i) sums[i] = plus_square(sums[i], read_gradient<kHalf>(gradient, at));
    double total = 0;
    for (double sum : sums) total += sum;
    return total;
}

static double squares(const void* gradient, bool half, int64_t first, int64_t last) {
    return half ? squares_of<true>(gradient, first, last) : squares_of<false>(gradient, first, last);
}
