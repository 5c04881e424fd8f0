// The step with 8-bit states once more, by hand, because this is where the time goes and compilers spend half of it on
// widening and narrowing. Included by kernel.cpp after plain.inl, in a namespace that defines vectors of kWidth lanes.
//
// Two vectors of 32-bit lanes are worked on at a time, in the order in which the processor's `unpack` leaves the 16-bit
// lanes of one vector and its `pack` takes them up again: both are single instructions. Codes come and go four vectors
// at a time, by way of 16-bit lanes: what they mean are bf16 numbers, or nearly, and what is cut from a number to make
// a code lies in its high half.

// What the elements of a Pair add to the dither of the first.
template <uint32_t kPer>
struct Lanes {
    int32_t lo[kWidth], hi[kWidth];

    constexpr Lanes() : lo(), hi() {
        for (uint32_t i = 0; i < kWidth; ++i) {
            lo[i] = (int32_t)((i / 4 * 8 + i % 4) * kPer);
            hi[i] = (int32_t)((i / 4 * 8 + i % 4 + 4) * kPer);
        }
    }
};

template <uint32_t kPer>
constexpr Lanes<kPer> kLanes;

static_assert((uint32_t)(2 * kWidth * kPerLane) == 0, "all Pairs of a block have the same dither");

// The dither of a Pair.
struct Words {
    Ints lo, hi;
};

template <uint32_t kPer>
INLINE Words words_from(uint32_t first) {
    const Ints start = all((int32_t)first);
    return {add(load((const void*)kLanes<kPer>.lo), start), add(load((const void*)kLanes<kPer>.hi), start)};
}

INLINE Words after(const Words& words, uint32_t by) {
    return {add(words.lo, all((int32_t)by)), add(words.hi, all((int32_t)by))};
}

INLINE Words shifted(const Words& words, int by) {
    return {shift_right_zeros(words.lo, by), shift_right_zeros(words.hi, by)};
}

INLINE Pair squared(Pair values) { return {mul(values.lo, values.lo), mul(values.hi, values.hi)}; }

INLINE Pair fused(Pair a, Pair b, Pair c) { return {fused(a.lo, b.lo, c.lo), fused(a.hi, b.hi, c.hi)}; }

INLINE Pair fused(Pair a, Floats by, Pair c) { return fused(a, Pair{by, by}, c); }

INLINE Pair fused(Pair a, Floats by, Floats plus) { return fused(a, by, Pair{plus, plus}); }

// The high halves of fp32 numbers after the dither has decided where they are cut.
INLINE Ints dithered(Pair values, const Words& dither) {
    return pack_high_halves(add(as_ints(values.lo), dither.lo), add(as_ints(values.hi), dither.hi));
}

template <bool kHalf>
INLINE Pair load_gradient(const void* gradient, int64_t i) {
    return kHalf ? widened(load((const uint16_t*)gradient + i)) : load_pair((const float*)gradient + i);
}

template <int kMaster>
INLINE Pair load_weights(const Task& t, int64_t i) {
    if (kMaster == kPlain) return load_pair((const float*)t.weights + i);
    Ints high = load((const uint16_t*)t.weights + i);
    if (kMaster == kStochastic) return widened(high);
    Ints low = load(t.low + i);
    high = add_16(high, shift_right_16(low, 15));  // the low halves are signed
    return {as_floats(unpack_lo(low, high)), as_floats(unpack_hi(low, high))};
}

template <int kMaster>
INLINE void store_weights(const Task& t, int64_t i, Pair weights, const Words& round) {
    if (kMaster == kPlain) return store_pair((float*)t.weights + i, weights);
    const Ints lo = as_ints(weights.lo), hi = as_ints(weights.hi);
    if (kMaster == kSplit) store(t.low + i, pack_low_halves(lo, hi));
    store((uint16_t*)t.weights + i, pack_high_halves(add(lo, round.lo), add(hi, round.hi)));
}

// A value that the compiler holds, in a register or in memory, rather than making it again for every block.
template <class V>
INLINE V held(V value) {
    asm("" : "+v"(value));
    return value;
}

// What is the same for all blocks.
struct Same {
    Floats root_factor, eps_term, shrink, m_zero, root_zero, sign;
    Ints half, least;

    INLINE explicit Same(const Task& t)
        : root_factor(held(all(t.root_factor))),
          eps_term(held(all(t.eps_term))),
          shrink(held(all(t.shrink))),
          m_zero(held(all(Momentum::zero))),
          root_zero(held(all(RootVariance::zero))),
          sign(held(as_floats(all(INT32_MIN)))),
          half(held(all(0x8000))),
          least(held(all_16(RootVariance::base >> 16))) {}
};

// The new m and sqrt(v) of a block, into `states`, and the largest of them.
template <bool kHalf>
struct Taking {
    const Task& t;
    const Same& same;
    const int64_t start;
    float *const ms, *const roots;
    Floats m_keep, root_keep, root_zero;
    Floats m_largest = all(0.0f);
    Ints root_largest = zero();
    Pair old_m[2], old_root[2];

    INLINE Taking(const Task& task, const Same& constants, int64_t index, float* states)
        : t(task), same(constants), start(index * t.block), ms(states), roots(states + t.block) {
        const Kept kept = kept_of(t, t.m_scales[index], t.v_scales[index]);
        m_keep = all(kept.m_keep);
        root_keep = all(kept.root_keep);
        root_zero = all(kept.root_zero);
    }

    // 4 kWidth codes from `at`, and the states of half of them.
    INLINE void decode(int64_t at) {
        decode_m(t.m_codes + start + at, old_m);
        floats_of_v(t.v_codes + start + at, old_root);
    }

    INLINE void half(int number, int64_t at) {
        const int64_t i = at + number * 2 * kWidth;
        const Pair gradient = load_gradient<kHalf>(t.gradient, start + i);
        const Pair m = fused(old_m[number], m_keep, gradient);
        const Pair old = fused(old_root[number], root_keep, root_zero);
        const Pair v = fused(old, old, squared(gradient));
        const Pair root = {square_root(v.lo), square_root(v.hi)};
        store(ms + i, m.lo);
        store(ms + i + kWidth, m.hi);
        store(roots + i, root.lo);
        store(roots + i + kWidth, root.hi);
        m_largest = larger_magnitude(larger_magnitude(m_largest, m.lo), m.hi);
        root_largest = larger(larger(root_largest, as_ints(root.lo)), as_ints(root.hi));
    }
};

// Reciprocals of a block's scales.
struct Inverses {
    Floats m, root;
};

// Writes a block's scales: `scale_of` and `scaled_by` of ../kernel.cpp for both states at once.
template <bool kHalf>
INLINE Inverses write_scales(const Task& t, int64_t index, const Taking<kHalf>& taken) {
    const __m128 largest = largest_of_both(as_ints(taken.m_largest), taken.root_largest);
    __m128 scale = _mm_mul_ps(largest, _mm_setr_ps(Momentum::span, RootVariance::span, 0, 0));
    scale = _mm_min_ps(_mm_max_ps(scale, _mm_set1_ps(kSmallestScale)), _mm_set1_ps(kLargestScale));
    const __m128 inverse = _mm_div_ps(_mm_set1_ps(1.0f), scale);
    const __m128 kept = _mm_mul_ps(scale, _mm_setr_ps(t.m_unit, t.root_unit, 0, 0));
    t.m_scales[index] = _mm_cvtss_f32(kept);
    t.v_scales[index] = _mm_cvtss_f32(_mm_movehdup_ps(kept));
    return {broadcast(inverse), broadcast(_mm_movehdup_ps(inverse))};
}

// Moves the weights of a block by the new states in `states`, and encodes these.
template <int kMaster>
struct Giving {
    const Task& t;
    const Same& same;
    const int64_t start;
    const float *const ms, *const roots;
    const Inverses inverses;
    Words m_dither, v_dither, weight_words;
    Ints m_halves[2], v_halves[2];

    INLINE Giving(const Task& task, const Same& constants, int64_t index, const float* states, const Inverses& by)
        : t(task), same(constants), start(index * t.block), ms(states), roots(states + t.block), inverses(by) {
        const Words words = words_from<kPerLane>(t.code_word + (uint32_t)index * kPerBlock);
        m_dither = shifted(words, 32 - Momentum::shift);
        v_dither = shifted(words, 32 - RootVariance::shift);
        weight_words = words_from<kPerWeight>(t.weight_word + (uint32_t)start * kPerWeight);
    }

    INLINE void half(int number, int64_t at) {
        const int64_t i = at + number * 2 * kWidth;
        const Pair m = {load(ms + i), load(ms + i + kWidth)}, root = {load(roots + i), load(roots + i + kWidth)};
        const Pair denominator = fused(root, same.root_factor, same.eps_term);
        const Pair old = load_weights<kMaster>(t, start + i);
        const Pair moves = fused(old, same.shrink, {divide(m.lo, denominator.lo), divide(m.hi, denominator.hi)});
        const Pair weights = {add(old.lo, moves.lo), add(old.hi, moves.hi)};
        const Words round = kMaster == kSplit ? Words{same.half, same.half} : shifted(weight_words, 16);
        store_weights<kMaster>(t, start + i, weights, round);
        if (kMaster == kStochastic) weight_words = after(weight_words, 2 * kWidth * kPerWeight);
        const Floats zero = same.m_zero, sign = same.sign;
        const Pair m_zeros = {with_sign_of(m.lo, zero, sign), with_sign_of(m.hi, zero, sign)};
        m_halves[number] = dithered(fused(m, inverses.m, m_zeros), m_dither);
        // What lies below the least code is lifted to it after the dither, which carries it no further than that.
        v_halves[number] = larger_16(dithered(fused(root, inverses.root, same.root_zero), v_dither), same.least);
    }

    INLINE void encode(int64_t at) {
        store_m(t.m_codes + start + at, m_halves);
        store_v(t.v_codes + start + at, v_halves);
    }
};

// Asks for the cache lines of `bytes` bytes.
INLINE void ask_for(const void* from, int bytes) {
    for (int at = 0; at < bytes; at += 64) _mm_prefetch((const char*)from + at, _MM_HINT_T0);
}

// Asks for what 4 kWidth elements from `i` on will need.
template <bool kHalf, int kMaster>
INLINE void ask_for_elements(const Task& t, int64_t i) {
    constexpr int kWeight = kMaster == kPlain ? 4 : 2, kGradient = kHalf ? 2 : 4;
    ask_for((const char*)t.gradient + i * kGradient, 4 * kWidth * kGradient);
    ask_for((const char*)t.weights + i * kWeight, 4 * kWidth * kWeight);
    if (kMaster == kSplit) ask_for(t.low + i, 4 * kWidth * 2);
    ask_for(t.m_codes + i, 4 * kWidth);
    ask_for(t.v_codes + i, 4 * kWidth);
}

// Blocks of a multiple of 4 kWidth elements. While the weights of one move, the next one's states are taken: roots and
// quotients share the divider evenly, and nothing waits for the largest of a block. Beside the last block it is taken
// once more, for nothing.
template <bool kHalf, int kMaster>
static void steps_8bit_wide(const Task& task, int64_t first, int64_t last, float* scratch) {
    const Task t = task;
    const Same same(t);
    float *now = scratch, *next = scratch + 2 * t.block;
    Taking<kHalf> begin(t, same, first, now);
    for (int64_t at = 0; at < t.block; at += 4 * kWidth) {
        begin.decode(at);
        for (int number = 0; number < 2; ++number) begin.half(number, at);
    }
    Inverses inverses = write_scales(t, first, begin);
    for (int64_t index = first; index < last; ++index) {
        const int64_t following = index + 1 < last ? index + 1 : index;
        Giving<kMaster> giving(t, same, index, now, inverses);
        Taking<kHalf> taking(t, same, following, next);
        for (int64_t at = 0; at < t.block; at += 4 * kWidth) {
            ask_for_elements<kHalf, kMaster>(t, taking.start + at + kAhead);
            taking.decode(at);
            for (int number = 0; number < 2; ++number) {
                taking.half(number, at);
                giving.half(number, at);
            }
            giving.encode(at);
        }
        if (following != index) inverses = write_scales(t, following, taking);
        std::swap(now, next);
    }
}
