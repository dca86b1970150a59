inline float fast_sin(float x) { return flush_subnormal(sinf(reduced_angle(x))); }
