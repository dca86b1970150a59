// torch.sign: -1, 0 or 1; NaN gives 0, as torch's CPU kernel does.
FG_INLINE float sign_of(float x) { return (x > 0.0f ? 1.0f : 0.0f) - (x < 0.0f ? 1.0f : 0.0f); }
FG_INLINE double sign_of(double x) { return (x > 0.0 ? 1.0 : 0.0) - (x < 0.0 ? 1.0 : 0.0); }
FG_INLINE i64 sign_of(i64 x) { return (i64)(x > 0) - (i64)(x < 0); }
FG_INLINE bool sign_of(bool x) { return x; }
