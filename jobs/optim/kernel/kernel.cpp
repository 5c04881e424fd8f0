// One pass of AdamW over gradient, 8-bit (or fp32) states and master weights, and the sum of squares of a gradient.
// A C interface without torch or Python headers, called through ctypes by ../native.py. For GCC and Clang.
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

#if !defined(X86) && defined(__x86_64__)
#define X86 1  // 0 builds what other processors get
#endif
#if X86
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))
#define EXPORT extern "C" __attribute__((visibility("default")))

// Mirrored field by field by ../native.py.
struct Task {
    void* weights;         // bf16 or fp32
    int16_t* low;          // low halves of a split master
    const void* gradient;  // bf16 or fp32
    uint8_t* m_codes;      // null when the states are fp32
    float* m_scales;
    uint8_t* v_codes;
    float* v_scales;
    float* m;
    float* v;
    int64_t numel;
    int64_t block;
    int32_t half_gradient;
    int32_t master;
    int32_t moves;  // whether weights change
    float shrink;  // these are explained in ../adamw.py
    float beta1;   // this and the next three are for fp32 states
    float gradient_factor;
    float beta2;
    float square_factor;
    float m_unit;  // this and the next three are for 8-bit states
    float root_unit;
    float m_keep;
    float root_keep;
    float root_factor;
    float eps_term;
    uint32_t code_word;
    uint32_t weight_word;
};

namespace {

enum { kPlain, kSplit, kStochastic };
enum { kBaseline, kAvx2, kAvx512 };

constexpr uint32_t kPerLane = 0xB0000000u, kPerBlock = 0x91E10DA5u, kPerWeight = 0xC13FA9A9u;  // as in ../codes.py
constexpr int64_t kChunk = 1 << 18;  // elements that a thread takes at a time, at most
constexpr int kShares = 4;           // chunks of each thread, at least
constexpr int64_t kAhead = 256;      // elements before they are worked on, memory is asked for them
constexpr int64_t kSumChunk = 1 << 16;
constexpr int kSums = 32;
constexpr int kLine = 16;  // numbers in a cache line
constexpr float kSmallestScale = 0x1p-126f, kLargestScale = 0x1p63f;

// One block of a task.
struct Block {
    void* weights;
    int16_t* low;
    const void* gradient;
    uint8_t *m_codes, *v_codes;
    float *m_scale, *v_scale;
    float *m, *v;
    int64_t numel;
    uint32_t code_word, weight_word;
};

Block block_of(const Task& t, int64_t index) {
    const int64_t at = index * t.block;
    Block b = {};
    b.weights = (char*)t.weights + at * (t.master == kPlain ? 4 : 2);
    b.low = t.low + at;
    b.gradient = (const char*)t.gradient + at * (t.half_gradient ? 2 : 4);
    b.m_codes = t.m_codes + at;
    b.v_codes = t.v_codes + at;
    b.m_scale = t.m_scales + index;
    b.v_scale = t.v_scales + index;
    b.m = t.m + at;
    b.v = t.v + at;
    b.numel = t.numel - at < t.block ? t.numel - at : t.block;
    b.code_word = t.code_word + (uint32_t)index * kPerBlock;
    b.weight_word = t.weight_word + (uint32_t)at * kPerWeight;
    return b;
}

// The codes of ../codes.py: `zero` is what is subtracted from a decoded float, `span` is 1 / (largest float - zero).
template <int kMantissa, bool kSigned>
struct Code {
    static constexpr bool is_signed = kSigned;
    static constexpr int32_t top = kSigned ? 127 : 255;
    static constexpr int shift = 23 - kMantissa;
    static constexpr int32_t base = 120 << 23;  // 2^-7: code 0
    static constexpr float largest = 2 - 1.0f / (1 << kMantissa) - 0x1p-21f;  // see _MARGIN there
};

struct Momentum : Code<4, true> {
    static constexpr float zero = 0x1p-7f, span = 1 / (largest - zero);
};

struct RootVariance : Code<5, false> {
    static constexpr float zero = 0x1.8p-8f, span = 1 / (largest - zero);
};

INLINE float as_float(int32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE int32_t as_int(float value) {
    int32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE int64_t as_int64(double value) {
    int64_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

// A sum with an odd last bit unless it is exact: rounding it on gives what the exact sum gives (Boldo and Melquiond
// 2008). Knuth's two-sum tells what it lacks.
double rounded_to_odd(double product, double c) {
    const double sum = product + c, part = sum - product, lacks = (product - (sum - part)) + (c - part);
    int64_t bits = as_int64(sum);
    if ((lacks > 0 || lacks < 0) && !(bits & 1)) bits += (lacks > 0) == (sum > 0) ? 1 : -1;
    double odd;
    std::memcpy(&odd, &bits, sizeof odd);
    return odd;
}

// a * b + c, rounded once, for processors that cannot: as in ../fused.py.
INLINE float fused_in_fp64(float a, float b, float c) {
    const double product = (double)a * b, sum = product + c;
    const bool tie = (as_int64(sum) & 0x1FFFFFFF) == 0x10000000, small = sum > -0x1p-126 && sum < 0x1p-126;
    return (float)(__builtin_expect(tie || small, 0) ? rounded_to_odd(product, c) : sum);
}

template <class C>
INLINE float scale_of(int32_t largest_bits) {
    float scale = as_float(largest_bits) * C::span;
    scale = scale > kSmallestScale ? scale : kSmallestScale;
    return scale < kLargestScale ? scale : kLargestScale;
}

// What decoding a block needs. sqrt(v) is (float - zero) * root_keep, with one multiplication.
struct Kept {
    float m_keep, root_keep, root_zero;
};

INLINE Kept kept_of(const Task& t, float m_scale, float v_scale) {
    const float root_keep = v_scale * t.root_keep;
    return {m_scale * t.m_keep, root_keep, -(RootVariance::zero * root_keep)};
}

// What encoding it needs, after its scales have been written.
struct Coded {
    float m_inverse, root_inverse;
};

INLINE Coded scaled_by(const Task& t, const Block& b, int32_t m_largest, int32_t root_largest) {
    const float m_scale = scale_of<Momentum>(m_largest), root_scale = scale_of<RootVariance>(root_largest);
    *b.m_scale = m_scale * t.m_unit;
    *b.v_scale = root_scale * t.root_unit;
    return {1.0f / m_scale, 1.0f / root_scale};
}

template <bool kHalf>
INLINE float read_gradient(const void* gradient, int64_t i) {
    if (kHalf) return as_float((int32_t)((uint32_t)((const uint16_t*)gradient)[i] << 16));
    return ((const float*)gradient)[i];
}

#define WIDE 0
namespace baseline {
#include "plain.inl"
#include "choose.inl"
}  // namespace baseline

#if X86
#undef WIDE
#define WIDE 1
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
namespace avx2 {
#include "avx2.inl"
#include "plain.inl"
#include "wide.inl"
#include "choose.inl"
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,prefer-vector-width=512")
#endif
namespace avx512 {
#include "avx512.inl"
#include "plain.inl"
#include "wide.inl"
#include "choose.inl"
}  // namespace avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif  // X86

using Steps = void (*)(const Task&, int64_t, int64_t, float*);
using Squares = double (*)(const void*, bool, int64_t, int64_t);

Steps steps_for(int set) {
#if X86
    if (set == kAvx512) return avx512::steps;
    if (set == kAvx2) return avx2::steps;
#endif
    return baseline::steps;
}

Squares squares_for(int set) {
#if X86
    if (set == kAvx512) return avx512::squares;
    if (set == kAvx2) return avx2::squares;
#endif
    return baseline::squares;
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

// Raised with every change of the interface or of the arithmetic.
EXPORT int32_t lazytrain_version() { return 8; }

// The widest instruction set of this processor that the library was built for.
EXPORT int32_t lazytrain_instruction_set() {
#if X86
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi"))
        return kAvx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return kAvx2;
#endif
    return kBaseline;
}

EXPORT void lazytrain_step(const Task* task, int32_t set, int32_t threads) {
    const Task& t = *task;
    const Steps steps = steps_for(set);
    const int64_t blocks = ceil_div(t.numel, t.block);
    const int64_t most = t.block < kChunk ? kChunk / t.block : 1, share = ceil_div(blocks, kShares * threads);
    const int64_t stride = share < 1 ? 1 : share < most ? share : most;
    const int64_t chunks = ceil_div(blocks, stride);
#pragma omp parallel num_threads(threads) if (threads > 1 && chunks > 1)
    {
        std::unique_ptr<float[]> memory(t.m_codes ? new float[4 * t.block + kLine] : nullptr);
        float* scratch = memory.get();
        while ((uintptr_t)scratch % (kLine * sizeof(float))) ++scratch;
#pragma omp for schedule(dynamic, 1)
        for (int64_t chunk = 0; chunk < chunks; ++chunk) {
            const int64_t first = chunk * stride, last = first + stride < blocks ? first + stride : blocks;
            steps(t, first, last, scratch);
        }
    }
}

EXPORT int64_t lazytrain_sum_chunk() { return kSumChunk; }

// `partial` holds one fp64 per chunk of lazytrain_sum_chunk() elements; their sum, in order, is returned.
EXPORT double lazytrain_squares(const void* gradient, int32_t half, int64_t numel, double* partial, int32_t set,
                                int32_t threads) {
    const Squares squares = squares_for(set);
    const int64_t chunks = ceil_div(numel, kSumChunk);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1 && chunks > 1)
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        const int64_t first = chunk * kSumChunk, last = first + kSumChunk < numel ? first + kSumChunk : numel;
        partial[chunk] = squares(gradient, half != 0, first, last);
    }
    double total = 0;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) total += partial[chunk];
    return total;
}
