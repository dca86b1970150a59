// Descriptor of a wgmma operand in shared memory, 128-byte swizzle, tile aligned to 1024 bytes. An atom is 8 lines of
// 128 bytes. K-major: `stride` is the distance of atoms along rows, `leading` is unused. MN-major (lines run along rows
// or columns): `leading` is the distance of atoms along the lines, `stride` that along K. To step within a tile,
// `wgmma_advance` by bytes.
__device__ __forceinline__ u64 wgmma_descriptor(const void* tile, u32 stride = 1024, u32 leading = 16) {
    constexpr u64 SWIZZLE_128B = 1ull << 62;
    const u64 address = (shared_address(tile) & 0x3ffff) >> 4;  // 18 bits; all fields count units of 16 bytes
    return SWIZZLE_128B | u64(stride >> 4) << 32 | u64(leading >> 4) << 16 | address;
}

__device__ __forceinline__ u64 wgmma_advance(u64 descriptor, u32 bytes) { return descriptor + (bytes >> 4); }
