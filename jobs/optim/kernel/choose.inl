// From the formats of a task to the instance made for them. Included by kernel.cpp once per instruction set.

template <bool kHalf, int kMaster>
INLINE void steps_as(const Task& t, int64_t first, int64_t last, float* scratch) {
#if WIDE
    if (t.m_codes && t.moves && t.block % (4 * kWidth) == 0) {
        const int64_t whole = last * t.block <= t.numel ? last : last - 1;
        if (first < whole) steps_8bit_wide<kHalf, kMaster>(t, first, whole, scratch);
        first = whole;
    }
#endif
    for (int64_t index = first; index < last; ++index) {
        if (t.m_codes)
            step_8bit<kHalf, kMaster>(t, block_of(t, index), scratch);
        else
            step_fp32<kHalf, kMaster>(t, block_of(t, index));
    }
}

template <bool kHalf>
INLINE void steps_on(const Task& t, int64_t first, int64_t last, float* scratch) {
    if (t.master == kSplit) return steps_as<kHalf, kSplit>(t, first, last, scratch);
    if (t.master == kPlain) return steps_as<kHalf, kPlain>(t, first, last, scratch);
    steps_as<kHalf, kStochastic>(t, first, last, scratch);
}

// The blocks from `first` to before `last`; `scratch` holds 2 numbers for each element of a block.
static void steps(const Task& t, int64_t first, int64_t last, float* scratch) {
    if (t.half_gradient) return steps_on<true>(t, first, last, scratch);
    steps_on<false>(t, first, last, scratch);
}
