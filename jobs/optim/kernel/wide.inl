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

INLINE Pair decode_m(const uint8_t* from) {
    constexpr int16_t kKept = (int16_t)(0x8000 | 127 << (Momentum::shift - 16));
    Ints bits = and_(shift_left_16(load_signed_8(from), Momentum::shift - 16), all_16(kKept));
    Pair values = widened(or_(bits, all_16(Momentum::base >> 16)));
    const Floats zero = all(Momentum::zero);
    return {subtract(values.lo, with_sign_of(values.lo, zero)), subtract(values.hi, with_sign_of(values.hi, zero))};
}

INLINE Pair decode_v(const uint8_t* from) {
    Ints bits = shift_left_16(load_8(from), RootVariance::shift - 16);
    Pair values = widened(or_(bits, all_16(RootVariance::base >> 16)));
    const Floats zero = all(RootVariance::zero);
    return {subtract(values.lo, zero), subtract(values.hi, zero)};
}

// The leading bits of fp32 numbers, sign included, after the dither has decided where they are cut.
template <class C>
INLINE Ints leading(Pair values, const Words& words) {
    Ints lo = add(as_ints(values.lo), shift_right_zeros(words.lo, 32 - C::shift));
    Ints hi = add(as_ints(values.hi), shift_right_zeros(words.hi, 32 - C::shift));
    return pack_unsigned(shift_right_zeros(lo, C::shift), shift_right_zeros(hi, C::shift));
}

INLINE void encode_m(uint8_t* to, Pair m, Floats inverse, const Words& words) {
    const Floats zero = all(Momentum::zero);
    m = plus(scaled(m, inverse), {with_sign_of(m.lo, zero), with_sign_of(m.hi, zero)});
    Ints bits = leading<Momentum>(m, words);
    Ints signs = and_(shift_right_16(bits, 24 - Momentum::shift), all_16(128));
    store_8(to, or_(and_(bits, all_16(Momentum::top)), signs));
}

INLINE void encode_v(uint8_t* to, Pair root, Floats inverse, const Words& words) {
    const Floats zero = all(RootVariance::zero);
    const Ints least = all(RootVariance::base);
    root = plus(scaled(root, inverse), {zero, zero});
    root = {as_floats(larger(as_ints(root.lo), least)), as_floats(larger(as_ints(root.hi), least))};
    store_8(to, leading<RootVariance>(root, words));
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
    Floats m_largest = all(0.0f);
    Ints v_largest = zero();
    for (int64_t i = 0; i < b.numel; i += 2 * kWidth) {
        Pair gradient = load_gradient<kHalf>(b.gradient, i);
        Pair m = plus(scaled(decode_m(b.m_codes + i), m_scale), scaled(gradient, all(t.gradient_factor)));
        Pair v = scaled(squared(decode_v(b.v_codes + i)), v_scale);
        v = plus(v, scaled(squared(gradient), all(t.square_factor)));
        Pair root = {square_root(v.lo), square_root(v.hi)};
        store(ms + i, m.lo);
        store(ms + i + kWidth, m.hi);
        store(roots + i, root.lo);
        store(roots + i + kWidth, root.hi);
        m_largest = larger_magnitude(larger_magnitude(m_largest, m.lo), m.hi);
        v_largest = larger(larger(v_largest, as_ints(root.lo)), as_ints(root.hi));
    }
    *b.m_scale = scale_of<Momentum>(largest_of(as_ints(m_largest)));
    *b.v_scale = scale_of<RootVariance>(largest_of(v_largest));
}

// One block of a multiple of 2 kWidth elements: first its new states, then its weights and codes.
template <bool kHalf, int kMaster>
static void step_8bit_wide(const Task& t, const Block& b, float* scratch) {
    float *ms = scratch, *roots = scratch + b.numel;
    new_states<kHalf>(t, b, ms, roots);
    const Floats m_inverse = all(1.0f / *b.m_scale), v_inverse = all(1.0f / *b.v_scale);
    Words code_words(b.code_word), weight_words(b.weight_word);
    const bool moves = t.moves;
    for (int64_t i = 0; i < b.numel; i += 2 * kWidth) {
        const Pair m = {load(ms + i), load(ms + i + kWidth)}, root = {load(roots + i), load(roots + i + kWidth)};
        if (moves) move<kMaster>(t, b, i, m, root, weight_words);
        encode_m(b.m_codes + i, m, m_inverse, code_words);
        encode_v(b.v_codes + i, root, v_inverse, code_words);
        code_words.advance();
        if (kMaster == kStochastic) weight_words.advance();
    }
}
