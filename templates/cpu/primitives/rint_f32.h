// The nearest integer, ties to even (torch.round).
FG_INLINE float rint_f32(float x) { return __builtin_rintf(x); }
