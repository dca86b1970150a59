inline float fast_log2(float x) { return log2f(flush_subnormal(x)); }
