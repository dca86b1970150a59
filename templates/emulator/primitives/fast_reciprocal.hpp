inline float fast_reciprocal(float x) { return flush_subnormal(1.0f / flush_subnormal(x)); }
