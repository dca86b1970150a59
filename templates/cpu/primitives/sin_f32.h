// sin(x) for every float, without a branch.
FG_INLINE float sin_f32(float x) {
    u32 quadrant;
    const float r = quarter_turns(x, quadrant);
    const float value = (quadrant & 1u) != 0u ? cos_reduced(r) : sin_reduced(r);
    return float_from_bits(float_bits(value) ^ (quadrant & 2u) << 30);
}
