// The arithmetic of one AdamW step in plain loops, for any processor; compilers vectorise them. Included by kernel.cpp
// once per instruction set. The operations and their order are those of ../adamw.py and ../codes.py, each is rounded
// once, and the build forbids the compiler to fuse others: every instruction set gives the same bits.

// a * b + c, rounded once.
INLINE float fused(float a, float b, float c) {
#if WIDE || defined(__FP_FAST_FMAF)
    return __builtin_fmaf(a, b, c);
#else
    return fused_in_fp64(a, b, c);
#endif
}

template <class C>
INLINE int32_t sign_of(int32_t bits) {
    return C::is_signed ? bits & INT32_MIN : 0;
}

// The float that a code is a piece of.
template <class C>
INLINE float float_of(uint8_t code) {
    return as_float((code & C::top) << C::shift | C::base);
}

INLINE float decode_m(uint8_t code) {
    float magnitude = float_of<Momentum>(code) - Momentum::zero;
    return as_float(as_int(magnitude) | sign_of<Momentum>((int32_t)((uint32_t)code << 24)));
}

// `word` is the dither, `inverse` is 1 / scale.
template <class C>
INLINE uint8_t encode(float value, float inverse, uint32_t word) {
    int32_t sign = sign_of<C>(as_int(value));
    int32_t bits = as_int(fused(value, inverse, as_float(as_int(C::zero) | sign)));
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
    float denominator = fused(root, t.root_factor, t.eps_term);
    float weight = read_weight<kMaster>(b, i);
    weight = weight + fused(weight, t.shrink, m / denominator);
    if (t.moves) write_weight<kMaster>(b, i, weight, word);
    return root;
}

// 8-bit states: read, updated, and encoded again while the block lies in the first-level cache.
template <bool kHalf, int kMaster>
static void step_8bit(const Task t, const Block b, float* scratch) {
    float *ms = scratch, *roots = scratch + b.numel;
    const Kept kept = kept_of(t, *b.m_scale, *b.v_scale);
    int32_t m_largest = 0, root_largest = 0;
#pragma omp simd reduction(max : m_largest, root_largest)
    for (int64_t i = 0; i < b.numel; ++i) {
        float gradient = read_gradient<kHalf>(b.gradient, i);
        float m = fused(decode_m(b.m_codes[i]), kept.m_keep, gradient);
        float old = fused(float_of<RootVariance>(b.v_codes[i]), kept.root_keep, kept.root_zero);
        float v = fused(old, old, gradient * gradient);
        float root = move<kMaster>(t, b, i, b.weight_word + (uint32_t)i * kPerWeight, m, v);
        ms[i] = m;
        roots[i] = root;
        int32_t magnitude = as_int(m) & 0x7FFFFFFF;
        m_largest = magnitude > m_largest ? magnitude : m_largest;
        root_largest = as_int(root) > root_largest ? as_int(root) : root_largest;
    }
    const Coded coded = scaled_by(t, b, m_largest, root_largest);
#pragma omp simd
    for (int64_t i = 0; i < b.numel; ++i) {
        uint32_t word = b.code_word + (uint32_t)i * kPerLane;
        b.m_codes[i] = encode<Momentum>(ms[i], coded.m_inverse, word);
        b.v_codes[i] = encode<RootVariance>(roots[i], coded.root_inverse, word);
    }
}

template <bool kHalf, int kMaster>
static void step_fp32(const Task t, const Block b) {
#pragma omp simd
    for (int64_t i = 0; i < b.numel; ++i) {
        float share = read_gradient<kHalf>(b.gradient, i) * t.gradient_factor;
        b.m[i] = fused(b.m[i], t.beta1, share);
        b.v[i] = fused(b.v[i], t.beta2, (share * share) * t.square_factor);
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
