inline float fast_exp(float x) { return exp2f(x * 1.4426950408889634f); }
