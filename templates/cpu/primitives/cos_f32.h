// cos(x) for every float, without a branch.
FG_INLINE float cos_f32(float x) {
    u32 quadrant;
    const float r = quarter_turns(x, quadrant);
    const float value = (quadrant & 1u) != 0u ? sin_reduced(r) : cos_reduced(r);
    return float_from_bits(float_bits(value) ^ ((quadrant + 1u) & 2u) << 30);
}
