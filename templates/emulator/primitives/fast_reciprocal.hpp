inline float fast_reciprocal(float x) { return 1.0f / x; }
