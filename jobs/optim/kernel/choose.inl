// From the formats of a task to the instance made for them. Included by kernel.cpp once per instruction set.

template <bool kHalf, int kMaster>
INLINE void step_as(const Task& t, const Block& b, float* scratch) {
    if (!t.m_codes) return step_fp32<kHalf, kMaster>(t, b);
#if WIDE
    if (b.numel % (2 * kWidth) == 0) return step_8bit_wide<kHalf, kMaster>(t, b, scratch);
#endif
    step_8bit<kHalf, kMaster>(t, b, scratch);
}

template <bool kHalf>
INLINE void step_on(const Task& t, const Block& b, float* scratch) {
    if (t.master == kSplit) return step_as<kHalf, kSplit>(t, b, scratch);
    if (t.master == kPlain) return step_as<kHalf, kPlain>(t, b, scratch);
    step_as<kHalf, kStochastic>(t, b, scratch);
}

static void step(const Task& t, const Block& b, float* scratch) {
    if (t.half_gradient) return step_on<true>(t, b, scratch);
    step_on<false>(t, b, scratch);
}
