inline float fast_log(float x) { return log2f(flush_subnormal(x)) * 0.6931471805599453f; }
