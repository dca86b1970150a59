inline float fast_cos(float x) { return cosf(reduced_angle(x)); }
