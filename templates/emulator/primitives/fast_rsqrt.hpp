inline float fast_rsqrt(float x) { return 1.0f / sqrtf(x); }
