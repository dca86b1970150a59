// Loads elements `begin` to `end` of an unaligned vector of N; the others are unspecified. Two neighboring aligned
// accesses contain the vector: whole words are shifted to the front, then bytes within words.
template <i32 N, typename T>
__device__ __forceinline__ void load_window(T (&dst)[N], const T* base, i64 i, i64 begin, i64 end) {
    constexpr i32 bytes = N * sizeof(T), step = vector_width(bytes), size = sizeof(T);
    static_assert(step >= 4, "vectors of whole words");
    const i32 skipped = static_cast<i32>(reinterpret_cast<u64>(base + i) % step);
    const i32 before = skipped / size, behind = skipped == 0 ? 0 : step / size - before;
    if (begin <= -before && N + behind <= end) {
        const u32* aligned = reinterpret_cast<const u32*>(base + (i - before));
        u32 words[(bytes + step) / 4] = {};
#pragma unroll
        for (i32 at = 0; at <= bytes / 4; at += step / 4) {
            u32 part[step / 4] = {};
            if (at < bytes / 4 || skipped != 0) load_vec(part, aligned, at);
#pragma unroll
            for (i32 w = 0; w < step / 4; ++w) words[at + w] = part[w];
        }
#pragma unroll
        for (i32 moved = step / 8; moved > 0; moved /= 2) {
#pragma unroll
            for (i32 w = 0; w + moved < (bytes + step) / 4; ++w) {
                words[w] = (skipped / 4 & moved) != 0 ? words[w + moved] : words[w];
            }
        }
        if constexpr (size < 4) {
#pragma unroll
            for (i32 w = 0; w < bytes / 4; ++w) words[w] = __funnelshift_r(words[w], words[w + 1], skipped % 4 * 8);
        }
        memcpy(dst, words, bytes);
    } else {
#pragma unroll
        for (i32 v = 0; v < N; ++v) {
            if (v >= begin && v < end) dst[v] = load(base, i + v);
        }
    }
}
