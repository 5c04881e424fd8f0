// The step with 8-bit states once more, by hand, because this is where the time goes and compilers spend half of it on
// widening and narrowing. Included by kernel.cpp after plain.inl, in a namespace that defines vectors of kWidth lanes.
//
// Two vectors of 32-bit lanes are worked on at a time, in the order in which the processor's `unpack` leaves the 16-bit
// lanes of one vector and its `pack` takes them up again: both are single instructions. And both codes decode in 16-bit
// lanes, two for the price of one: their values are bf16 numbers.

struct Pair {
    Floats lo, hi;
};

struct Words {
    Ints lo, hi;

    explicit Words(uint32_t first) {
        int32_t words[2 * kWidth];
        for (int i = 0; i < kWidth; ++i) {
            words[i] = (int32_t)(first + (uint32_t)(i / 4 * 8 + i % 4) * kPerLane);
            words[kWidth + i] = (int32_t)((uint32_t)words[i] + 4 * kPerLane);
        }
        std::memcpy(&lo, words, sizeof lo);
        std::memcpy(&hi, words + kWidth, sizeof hi);
    }

    INLINE void advance() {
        lo = add(lo, all((int32_t)(2 * kWidth * kPerLane)));
        hi = add(hi, all((int32_t)(2 * kWidth * kPerLane)));
    }
};

// bf16 numbers, or the codes decoded to them, as fp32.
INLINE Pair widened(Ints halves) {
    return {as_floats(unpack_lo(zero(), halves)), as_floats(unpack_hi(zero(), halves))};
}

INLINE Pair scaled(Pair values, Floats by) { return {mul(values.lo, by), mul(values.hi, by)}; }

INLINE Pair plus(Pair a, Pair b) { return {add(a.lo, b.lo), add(a.hi, b.hi)}; }

INLINE Pair squared(Pair values) { return {mul(values.lo, values.lo), mul(values.hi, values.hi)}; }

INLINE Ints decode_m(Ints codes) {
    Ints bits = and_(shift_right_16(shift_left_16(codes, 8), 24 - Momentum::shift), all_16((int16_t)(0x8000 | 127 << (Momentum::shift - 16))));
    return add_16_where_nonzero(bits, all_16(0x7FFF), all_16(Momentum::base >> 16));
}

INLINE Ints decode_v(Ints codes) {
    return add_16(shift_left_16(codes, RootVariance::shift - 16), all_16(RootVariance::base >> 16));
}

// The leading bits of fp32 numbers, sign included, after the dither has decided where they are cut.
template <class C>
INLINE Ints leading(Pair values, Floats by, const Words& words) {
    Ints lo = add(as_ints(mul(values.lo, by)), shift_right_zeros(words.lo, 32 - C::shift));
    Ints hi = add(as_ints(mul(values.hi, by)), shift_right_zeros(words.hi, 32 - C::shift));
    return pack_unsigned(shift_right_zeros(lo, C::shift), shift_right_zeros(hi, C::shift));
}

// `words` lie half their range above those of the plain code: the dither is then positive, and rounding is a cut.
INLINE void encode_m(uint8_t* to, Pair m, Floats inverse, const Words& words) {
    constexpr int kSign = 31 - Momentum::shift;
    Ints bits = leading<Momentum>(m, inverse, words);
    Ints magnitudes = and_(bits, all_16((1 << kSign) - 1));
    magnitudes = subtract_to_zero_16(magnitudes, all_16(Momentum::base >> Momentum::shift));
    Ints signs = and_(shift_right_16(bits, kSign - 7), all_16(128));
    store_8(to, or_(smaller_16(magnitudes, all_16(Momentum::top)), signs));
}

INLINE void encode_v(uint8_t* to, Pair root, Floats inverse, const Words& words) {
    Ints bits = leading<RootVariance>(root, inverse, words);
    store_8(to, subtract_to_zero_16(bits, all_16(RootVariance::base >> RootVariance::shift)));  // saturates at 255
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

INLINE Pair move(const Task& t, Pair& weights, Pair m, Pair v) {
    Pair root = {square_root(v.lo), square_root(v.hi)};
    Pair denominator = plus(scaled(root, all(t.root_factor)), {all(t.eps_term), all(t.eps_term)});
    weights = plus(scaled(weights, all(t.decay)), {divide(m.lo, denominator.lo), divide(m.hi, denominator.hi)});
    return root;
}

// One block, of a multiple of 2 kWidth elements.
template <bool kHalf, int kMaster>
static void step_8bit_wide(const Task t, const Block b, float* scratch) {
    float *ms = scratch, *roots = scratch + b.numel;
    const Floats m_scale = all(*b.m_scale * t.beta1), v_scale = all(*b.v_scale * *b.v_scale * t.beta2);
    Floats m_largest = all(0.0f);
    Ints v_largest = zero();
    Words words(b.weight_word);
    for (int64_t i = 0; i < b.numel; i += 2 * kWidth) {
        Pair gradient = load_gradient<kHalf>(b.gradient, i);
        Pair m = scaled(widened(decode_m(load_8(b.m_codes + i))), m_scale);
        m = plus(m, scaled(gradient, all(t.gradient_factor)));
        Pair v = scaled(squared(widened(decode_v(load_8(b.v_codes + i)))), v_scale);
        v = plus(v, scaled(squared(gradient), all(t.square_factor)));
        Pair weights = load_weights<kMaster>(b, i);
        Pair root = move(t, weights, m, v);
        if (t.moves) store_weights<kMaster>(b, i, weights, words);
        if (kMaster == kStochastic) words.advance();
        store(ms + i, m.lo);
        store(ms + i + kWidth, m.hi);
        store(roots + i, root.lo);
        store(roots + i + kWidth, root.hi);
        m_largest = larger_magnitude(larger_magnitude(m_largest, m.lo), m.hi);
        v_largest = larger(larger(v_largest, as_ints(root.lo)), as_ints(root.hi));
    }
    *b.m_scale = scale_of(largest_of(as_ints(m_largest)));
    *b.v_scale = scale_of(largest_of(v_largest));
    const Floats m_inverse = all(1.0f / *b.m_scale), v_inverse = all(1.0f / *b.v_scale);
    words = Words(b.code_word + 0x80000000u);
    for (int64_t i = 0; i < b.numel; i += 2 * kWidth, words.advance()) {
        encode_m(b.m_codes + i, {load(ms + i), load(ms + i + kWidth)}, m_inverse, words);
        encode_v(b.v_codes + i, {load(roots + i), load(roots + i + kWidth)}, v_inverse, words);
    }
}
