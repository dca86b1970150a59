// Loads four 8 x 8 matrices of 16-bit values from shared memory; lane 8 i + r gives the address of row r of matrix i,
// 16 aligned bytes. Of each matrix, lane l gets row l / 4, columns 2 (l % 4) and the next one. All 32 lanes take part.
__device__ __forceinline__ void ldmatrix(u32 (&matrices)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(address)
                 : "memory");
}
