// e^(x - peak) of x up to the peak, 1 where they are equal, be it infinities. Relative errors grow with the distance, as the values
// fall: in a sum in which the peak takes part they are within three units in the last place.
__device__ __forceinline__ float exp_below(float x, float peak) { return x == peak ? 1.0f : fast_exp(x - peak); }
