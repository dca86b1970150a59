inline float fast_exp2(float x) { return flush_subnormal(exp2f(flush_subnormal(x))); }
