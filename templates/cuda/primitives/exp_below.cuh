// e^(x - peak) for x <= peak; 1 if they are equal, infinities included. The relative error grows with the distance
// while the value falls: in a sum that includes the peak it is within 3 units in the last place.
__device__ __forceinline__ float exp_below(float x, float peak) { return x == peak ? 1.0f : fast_exp(x - peak); }
