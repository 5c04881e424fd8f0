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

INLINE Pair scaled(Pair values, Floats by) { return {mul(values.lo, by), mul(values.hi, by)}; }

INLINE Pair plus(Pair a, Pair b) { return {add(a.lo, b.lo), add(a.hi, b.hi)}; }

INLINE Pair squared(Pair values) { return {mul(values.lo, values.lo), mul(values.hi, values.hi)}; }

// The high halves of fp32 numbers after the dither has decided where they are cut.
INLINE Ints dithered(Pair values, const Words& dither) {
    return pack_high_halves(add(as_ints(values.lo), dither.lo), add(as_ints(values.hi), dither.hi));
}

INLINE Ints dithered_m(Pair m, Floats inverse, const Words& dither) {
    const Floats zero = all(Momentum::zero);
    return dithered(plus(scaled(m, inverse), {with_sign_of(m.lo, zero), with_sign_of(m.hi, zero)}), dither);
}

// What lies below the least code is lifted to it after the dither, which can carry it no further than that.
INLINE Ints dithered_v(Pair root, Floats inverse, const Words& dither) {
    const Floats zero = all(RootVariance::zero);
    return larger_16(dithered(plus(scaled(root, inverse), {zero, zero}), dither), all_16(RootVariance::base >> 16));
}

template <bool kHalf>
INLINE Pair load_gradient(const void* gradient, int64_t i) {
    return kHalf ? widened(load((const uint16_t*)gradient + i)) : load_pair((const float*)gradient + i);
}

template <int kMaster>
INLINE Pair load_weights(const Block& b, int64_t i) {
    if (kMaster == kPlain) return load_pair((const float*)b.weights + i);
    Ints high = load((const uint16_t*)b.weights + i);
    if (kMaster == kStochastic) return widened(high);
    Ints low = load(b.low + i);
    high = add_16(high, shift_right_16(low, 15));  // the low halves are signed
    return {as_floats(unpack_lo(low, high)), as_floats(unpack_hi(low, high))};
}

template <int kMaster>
INLINE void store_weights(const Block& b, int64_t i, Pair weights, const Words& words) {
    if (kMaster == kPlain) return store_pair((float*)b.weights + i, weights);
    Ints lo = as_ints(weights.lo), hi = as_ints(weights.hi);
    if (kMaster == kSplit) {
        store(b.low + i, pack_low_halves(lo, hi));
        lo = add(lo, all(0x8000));
        hi = add(hi, all(0x8000));
    } else {
        lo = add(lo, shift_right_zeros(words.lo, 16));
        hi = add(hi, shift_right_zeros(words.hi, 16));
    }
    store((uint16_t*)b.weights + i, pack_high_halves(lo, hi));
}

template <int kMaster>
INLINE void move(const Task& t, const Block& b, int64_t i, Pair m, Pair root, const Words& words) {
    Pair denominator = plus(scaled(root, all(t.root_factor)), {all(t.eps_term), all(t.eps_term)});
    Pair weights = scaled(load_weights<kMaster>(b, i), all(t.decay));
    weights = plus(weights, {divide(m.lo, denominator.lo), divide(m.hi, denominator.hi)});
    store_weights<kMaster>(b, i, weights, words);
}

// m and sqrt(v) of a block into `ms` and `roots`, and their scales.
template <bool kHalf>
INLINE void new_states(const Task& t, const Block& b, float* ms, float* roots) {
    const Floats m_scale = all(*b.m_scale * t.beta1), v_scale = all(*b.v_scale * *b.v_scale * t.beta2);
    const Floats gradient_factor = all(t.gradient_factor), square_factor = all(t.square_factor);
    Floats m_largest = all(0.0f);
    Ints v_largest = zero();
    for (int64_t at = 0; at < b.numel; at += 4 * kWidth) {
        Pair kept_m[2], kept_v[2];
        decode_m(b.m_codes + at, kept_m);
        decode_v(b.v_codes + at, kept_v);
        for (int half = 0; half < 2; ++half) {
            const int64_t i = at + half * 2 * kWidth;
            Pair gradient = load_gradient<kHalf>(b.gradient, i);
            Pair m = plus(scaled(kept_m[half], m_scale), scaled(gradient, gradient_factor));
            Pair v = plus(scaled(squared(kept_v[half]), v_scale), scaled(squared(gradient), square_factor));
            Pair root = {square_root(v.lo), square_root(v.hi)};
            store(ms + i, m.lo);
            store(ms + i + kWidth, m.hi);
            store(roots + i, root.lo);
            store(roots + i + kWidth, root.hi);
            m_largest = larger_magnitude(larger_magnitude(m_largest, m.lo), m.hi);
            v_largest = larger(larger(v_largest, as_ints(root.lo)), as_ints(root.hi));
        }
    }
    *b.m_scale = scale_of<Momentum>(largest_of(as_ints(m_largest)));
    *b.v_scale = scale_of<RootVariance>(largest_of(v_largest));
}

// Moves the weights of a block by its new states, and encodes these.
template <int kMaster>
INLINE void move_and_encode(const Task& t, const Block& b, const float* ms, const float* roots) {
    const Floats m_inverse = all(1.0f / *b.m_scale), v_inverse = all(1.0f / *b.v_scale);
    const Words words = words_from<kPerLane>(b.code_word);
    const Words m_dither = shifted(words, 32 - Momentum::shift), v_dither = shifted(words, 32 - RootVariance::shift);
    Words weight_words = words_from<kPerWeight>(b.weight_word);
    for (int64_t at = 0; at < b.numel; at += 4 * kWidth) {
        Ints m_halves[2], v_halves[2];
        for (int half = 0; half < 2; ++half) {
            const int64_t i = at + half * 2 * kWidth;
            const Pair m = {load(ms + i), load(ms + i + kWidth)}, root = {load(roots + i), load(roots + i + kWidth)};
            if (t.moves) move<kMaster>(t, b, i, m, root, weight_words);
            m_halves[half] = dithered_m(m, m_inverse, m_dither);
            v_halves[half] = dithered_v(root, v_inverse, v_dither);
            if (kMaster == kStochastic) weight_words = after(weight_words, 2 * kWidth * kPerWeight);
        }
        store_m(b.m_codes + at, m_halves);
        store_v(b.v_codes + at, v_halves);
    }
}

// Blocks of a multiple of 4 kWidth elements: of each first its new states, then its weights and codes.
template <bool kHalf, int kMaster>
static void steps_8bit_wide(const Task& task, int64_t first, int64_t last, float* scratch) {
    const Task t = task;
    float *ms = scratch, *roots = scratch + t.block;
    for (int64_t index = first; index < last; ++index) {
        const Block b = block_of(t, index);
        new_states<kHalf>(t, b, ms, roots);
        move_and_encode<kMaster>(t, b, ms, roots);
    }
}
