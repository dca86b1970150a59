inline float fast_exp(float x) { return flush_subnormal(exp2f(flush_subnormal(x * 1.4426950408889634f))); }
