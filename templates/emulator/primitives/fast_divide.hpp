inline float fast_divide(float a, float b) { return a / b; }
