inline float fast_sqrt(float x) { return sqrtf(flush_subnormal(x)); }
